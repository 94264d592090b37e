"""Streams: the text of the whole answer, byte for byte, in every API, and no event without news."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from support.client import EXACT, HTTP, Client, assert_same, random_prompts, wait_until
from support.demo_pair import DEMO
from support.models import load_tokenizer

PROMPTS = random_prompts(3, 57)
LIMIT = {"max_new_tokens": 60, "ignore_eos": True}
CHARACTERS = {"regex": "(é|ß|日|本|語|😀|𝄞){24}", "max_new_tokens": 120}
"""One byte per token: steps end inside characters."""
SERVERS = pytest.mark.parametrize(
    ("server", "options"), [("token", {}), ("semantic", EXACT), ("overlap", EXACT)]
)
CHATS = pytest.mark.parametrize(("server", "options"), [("token", {}), ("overlap", EXACT)])


@pytest.fixture
def client(request: pytest.FixtureRequest, server: str) -> Iterator[Client]:
    client: Client = request.getfixturevalue(server)
    yield client
    client.assert_nothing_lost()


def events(client: Client, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a stream."""
    with HTTP.stream("POST", f"{client.url}{path}", json=body | {"stream": True}) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            line = line.removeprefix("data: ")
            if line and line != "[DONE]":
                yield json.loads(line)


def stream(
    client: Client, prompt: list[int], options: dict[str, Any] | None = None, **fields: Any
) -> list[dict[str, Any]]:
    """The answers of a native stream, the last event of each; asserts that each event has news."""
    params = {"temperature": 0, **fields.pop("sampling")}
    if options is not None:
        params["custom_params"] = {"parse": options}
    asked = {"input_ids": prompt, "sampling_params": params, **fields}
    latest: dict[int, dict[str, Any]] = {}
    for event in events(client, "/generate", asked):
        before = latest.get(event.get("index", 0), {"output_ids": [], "text": ""})
        assert event["text"].startswith(before["text"])
        is_longer = len(event["output_ids"]) > len(before["output_ids"])
        assert is_longer or event["meta_info"]["finish_reason"]
        latest[event.get("index", 0)] = event
    return [latest[index] for index in sorted(latest)]


# -- the native API -----------------------------------------------------------------------


@SERVERS
@pytest.mark.parametrize(
    ("sampling", "fields"),
    [
        (LIMIT, {}),
        (LIMIT | {"stream_interval": 7}, {}),
        (LIMIT | {"n": 2}, {}),
        (LIMIT, {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}),
    ],
    ids=["plain", "interval", "n", "logprobs"],
)
def test_native(
    client: Client, plain: Client, options: dict, sampling: dict[str, Any], fields: dict[str, Any]
):
    for prompt in PROMPTS:
        theirs = plain.generate(prompt, top=fields, **sampling)
        ours = stream(client, prompt, options, sampling=sampling, **fields)
        for our, their in zip(ours, theirs if isinstance(theirs, list) else [theirs], strict=True):
            assert_same(our, their)
            for key in ("output_token_logprobs", "input_token_logprobs"):
                left, right = (answer["meta_info"].get(key, []) for answer in (our, their))
                assert [ids for _, ids, _ in left] == [ids for _, ids, _ in right]


@SERVERS
@pytest.mark.parametrize("place", [3, 12, 30])
def test_stop_strings(client: Client, plain: Client, options: dict, place: int):
    for prompt in PROMPTS:
        text = plain.generate(prompt, **LIMIT)["text"]
        start = len(text) * place // 60
        asked = LIMIT | {"stop": [text[start : start + 3]]}
        (ours,) = stream(client, prompt, options, sampling=asked)
        assert_same(ours, plain.generate(prompt, **asked))


@pytest.mark.parametrize(("server", "options"), [("token", {})])
def test_characters_of_several_tokens(client: Client, plain: Client, options: dict):
    for prompt in (*PROMPTS, *random_prompts(5, 58)):
        (ours,) = stream(client, prompt, options, sampling=CHARACTERS)
        assert_same(ours, plain.generate(prompt, **CHARACTERS))


def test_accepted_drafts(wordings: Client):
    """Of whole lines: what is streamed is what is answered."""
    tokenizer = load_tokenizer(DEMO / "target")
    del tokenizer
    for prompt in ("Start with 12. Add 7, then multiply by 3.", "1 2 3 4 5"):
        ids = wordings.post("/tokenize", {"prompt": prompt}).json()["tokens"]
        (ours,) = stream(wordings, ids, sampling={"max_new_tokens": 120})
        whole = wordings.generate(ids, max_new_tokens=120)
        assert (ours["text"], ours["output_ids"]) == (whole["text"], whole["output_ids"])
    wordings.assert_nothing_lost()


@SERVERS
def test_an_abort_amid_a_stream(client: Client, plain: Client, options: dict):
    """What came before it is a beginning of the answer, whole characters only."""
    limit = {"max_new_tokens": 600, "ignore_eos": True}
    whole = plain.generate(PROMPTS[0], **limit)
    seen: list[dict[str, Any]] = []

    def read() -> None:
        params = {"temperature": 0, "custom_params": {"parse": options}, **limit}
        body = {"input_ids": PROMPTS[0], "sampling_params": params, "rid": f"aborted-{client.url}"}
        seen.extend(events(client, "/generate", body) for _ in ())
        for event in events(client, "/generate", body):
            seen.append(event)

    reader = threading.Thread(target=read)
    reader.start()
    wait_until(lambda: len(seen) > 2, "three events")
    client.abort(f"aborted-{client.url}")
    reader.join()
    assert seen[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    lengths = [len(event["output_ids"]) for event in seen[:-1]]
    assert lengths == sorted(set(lengths))
    for event in seen:
        assert whole["output_ids"][: len(event["output_ids"])] == event["output_ids"]
        assert whole["text"].startswith(event["text"])


# -- OpenAI's API -------------------------------------------------------------------------


def chat(
    client: Client, options: dict | None, is_streamed: bool, **fields: Any
) -> dict[str, str | int]:
    """Everything of a chat's answer; asserts that each event has news."""
    api = openai.OpenAI(base_url=f"{client.url}/v1", api_key="none")
    custom = {"custom_params": {"parse": options}} if options is not None else {}
    fields["extra_body"] = {**fields.pop("extra_body", {}), **custom}
    asked = {
        "model": "m",
        "messages": [{"role": "user", "content": "Start with 12, add 7"}],
        "temperature": 0,
        "max_tokens": 90,
        **fields,
    }
    if not is_streamed:
        reply = api.chat.completions.create(**asked)
        choice = reply.choices[0]
        answer = [(choice.message, choice.finish_reason)]
        usage = reply.usage
    else:
        answer, usage = [], None
        for chunk in api.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                delta = choice.delta.model_dump(exclude_none=True)
                assert choice.finish_reason or any(delta.values())
                answer.append((choice.delta, choice.finish_reason))
    texts: dict[str, Any] = {"content": "", "reasoning_content": "", "finish_reason": ""}
    for message, reason in answer:
        texts["content"] += message.content or ""
        texts["reasoning_content"] += getattr(message, "reasoning_content", None) or ""
        texts["finish_reason"] += reason or ""
        for call in message.tool_calls or ():
            key = f"call {getattr(call, 'index', 0) or 0}"
            texts[key] = texts.get(key, "") + (call.function.name or "") + call.function.arguments
    texts["completion_tokens"] = usage.completion_tokens
    texts["reasoning_tokens"] = usage.model_extra["reasoning_tokens"]
    return texts
