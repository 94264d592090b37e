"""Streams: the text of the whole answer, byte for byte, in every API, and no event without news."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.client import (
    DRAFTS,
    EXACT,
    HTTP,
    Client,
    assert_same,
    chunks_of,
    parse_info,
    random_prompts,
)

PROMPTS = random_prompts(2, 57)
LIMIT = {"max_new_tokens": 48, "ignore_eos": True}
CHARACTERS = {"regex": "(é|ß|日|本|語|😀|𝄞){14}", "max_new_tokens": 80}
"""One byte per token: steps end inside characters."""
NATIVE = {
    "plain": (LIMIT, {}),
    "interval": (LIMIT | {"stream_interval": 7}, {}),
    "two answers": (LIMIT | {"n": 2}, {}),
    "log probabilities": (LIMIT, {"return_logprob": True, "logprob_start_len": 0}),
}
FUNCTION = {
    "name": "say",
    "parameters": {
        "type": "object",
        "properties": {"text": {"enum": ["é 日本, in one", "or in two"]}},
        "required": ["text"],
    },
}
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}], "parallel_tool_calls": False}
CHATS: dict[str, dict[str, Any]] = {
    "no tools": {},
    "tools": TOOLS,
    "required": {
        **TOOLS,
        "tool_choice": "required",
        "chat_template_kwargs": {"enable_thinking": False},
    },
}
MORE = pytest.mark.nightly("tests/e2e/test_streams.py::test_native")
SERVERS = pytest.mark.parametrize(
    ("server", "options"),
    [("token", DRAFTS), ("overlap", EXACT), pytest.param("semantic", EXACT, marks=MORE)],
)
CHAT_SERVERS = pytest.mark.parametrize(
    ("server", "options"), [("token", DRAFTS), ("overlap", EXACT)]
)


@pytest.fixture
def client(request: pytest.FixtureRequest, server: str) -> Iterator[Client]:
    client: Client = request.getfixturevalue(server)
    yield client
    client.assert_nothing_lost()


def native(
    prompt: list[int], options: dict[str, Any] | None = None, /, **sampling: Any
) -> dict[str, Any]:
    """The body of a request to ``/generate``."""
    custom = {} if options is None else {"custom_params": {"parse": options}}
    return {"input_ids": prompt, "sampling_params": {"temperature": 0, **custom, **sampling}}


def streamed(client: Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The last event of each answer to a native request; asserts that each event has news."""
    latest: dict[int, dict[str, Any]] = {}
    for event in chunks_of(client, "/generate", body):
        before = latest.get(event.get("index", 0), {"output_ids": [], "text": ""})
        assert event["text"].startswith(before["text"])
        # Of two answers' events, SGLang may write the ids later than the text, with newer ones.
        has_more = any(len(event[kind]) > len(before[kind]) for kind in ("output_ids", "text"))
        assert has_more or event["meta_info"]["finish_reason"]
        latest[event.get("index", 0)] = event
    return [latest[index] for index in sorted(latest)]


# -- the native API -----------------------------------------------------------------------


Wish = tuple[list[int], dict[str, Any], dict[str, Any]]
"""A prompt, sampling parameters, and fields beside them."""


@pytest.fixture(scope="module")
def expected(plain: Client) -> list[tuple[Wish, Any]]:
    """Wishes of every kind, and what the plain server answers."""
    wishes = [(prompt, *case) for prompt in PROMPTS for case in NATIVE.values()]
    for prompt in PROMPTS:
        text = plain.generate(prompt, **LIMIT)["text"]
        for start in (len(text) // 5, len(text) // 2):
            wishes.append((prompt, LIMIT | {"stop": [text[start : start + 3]]}, {}))
    with ThreadPoolExecutor(len(wishes)) as pool:
        answers = pool.map(lambda wish: plain.generate(wish[0], top=wish[2], **wish[1]), wishes)
        return list(zip(wishes, answers, strict=True))


@SERVERS
def test_native(client: Client, expected: list[tuple[Wish, Any]], options: dict):
    """All at once."""

    def send(wish: Wish) -> list[dict[str, Any]]:
        prompt, sampling, top = wish
        return streamed(client, native(prompt, options, **sampling) | top)

    with ThreadPoolExecutor(len(expected)) as pool:
        found = [*pool.map(send, (wish for wish, _ in expected))]
    for ours, (_, theirs) in zip(found, expected, strict=True):
        for our, their in zip(ours, theirs if isinstance(theirs, list) else [theirs], strict=True):
            assert_same(our, their)
            for key in ("input_token_logprobs", "output_token_logprobs"):
                left, right = (answer["meta_info"].get(key, []) for answer in (our, their))
                assert [row[1] for row in left] == [row[1] for row in right]


@pytest.mark.parametrize(("server", "options"), [("token", DRAFTS)])
def test_characters_of_several_tokens(client: Client, plain: Client, options: dict):
    prompts = [*PROMPTS, *random_prompts(2, 58)]
    theirs = plain.generate_all(prompts, len(prompts), **CHARACTERS)
    with ThreadPoolExecutor(len(prompts)) as pool:
        bodies = [native(prompt, options, **CHARACTERS) for prompt in prompts]
        for (ours,), their in zip(
            pool.map(lambda body: streamed(client, body), bodies), theirs, strict=True
        ):
            assert_same(ours, their)


def test_accepted_drafts(semantic: Client):
    """Of many tokens each."""
    accepting = DRAFTS | {"threshold": 0.0}
    for prompt in PROMPTS:
        (ours,) = streamed(semantic, native(prompt, accepting, **LIMIT))
        assert_same(ours, semantic.generate(prompt, parse=accepting, **LIMIT))
        assert parse_info(ours)["accepted_tokens"] > 10
    semantic.assert_nothing_lost()


@SERVERS
def test_an_abort_amid_a_stream(client: Client, plain: Client, options: dict):
    """What came before it is a beginning of the answer."""
    limit = {"max_new_tokens": 900, "ignore_eos": True}
    rid = f"aborted by {client.url}"
    seen = []
    for event in chunks_of(
        client, "/generate", native(PROMPTS[0], options, **limit) | {"rid": rid}
    ):
        seen.append(event)
        if len(seen) == 3:
            client.abort(rid)
    assert seen[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    lengths = [len(event["output_ids"]) for event in seen[:-1]]
    assert lengths == sorted({*lengths})
    whole = plain.generate(PROMPTS[0], **limit | {"max_new_tokens": len(seen[-1]["output_ids"])})
    assert seen[-1]["output_ids"] == whole["output_ids"]
    assert all(whole["text"].startswith(event["text"]) for event in seen)


# -- OpenAI's API -------------------------------------------------------------------------


def chat_body(options: dict | None = None, **fields: Any) -> dict[str, Any]:
    asked = {
        "model": "m",
        "messages": [{"role": "user", "content": "Start with 12, add 7"}],
        "temperature": 0,
        "max_tokens": 90,
        **fields,
    }
    return asked if options is None else asked | {"custom_params": {"parse": options}}


def collected(messages: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
    """Everything of a chat's answer, by name."""
    made: dict[str, Any] = dict.fromkeys(("content", "reasoning_content", "finish_reason"), "")
    for message in messages:
        for key in made.keys() & message.keys():
            made[key] += message[key] or ""
        for call in message.get("tool_calls") or ():
            given = call["function"]
            made["call"] = made.get("call", "") + (given["name"] or "") + given["arguments"]
    return made | {key: usage[key] for key in ("completion_tokens", "reasoning_tokens")}


def chat(client: Client, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post("/v1/chat/completions", body)
    response.raise_for_status()
    (choice,) = response.json()["choices"]
    message = {**choice["message"], "finish_reason": choice["finish_reason"]}
    return collected([message], response.json()["usage"])


def streamed_chat(client: Client, body: dict[str, Any]) -> dict[str, Any]:
    """As ``chat``; asserts that each event but the first, which names the role, has news."""
    body = body | {"stream_options": {"include_usage": True}}
    messages: list[dict[str, Any]] = []
    for event in chunks_of(client, "/v1/chat/completions", body):
        for choice in event["choices"]:
            message = {**choice["delta"], "finish_reason": choice["finish_reason"]}
            assert any(message.values()), event
            messages.append(message)
    return collected(messages, event["usage"])


def three_chats(
    client: Client, plain: Client, options: dict, case: dict[str, Any]
) -> list[dict[str, Any]]:
    """A streamed answer, a whole one, and the plain server's, asked for at once."""
    body = chat_body(options, **case)
    asked = [(streamed_chat, client, body), (chat, client, body), (chat, plain, chat_body(**case))]
    with ThreadPoolExecutor(len(asked)) as pool:
        return [job.result() for job in [pool.submit(*one) for one in asked]]


@CHAT_SERVERS
@pytest.mark.parametrize("case", CHATS)
def test_chats(client: Client, plain: Client, options: dict, case: str):
    ours, whole, theirs = three_chats(client, plain, options, CHATS[case])
    assert ours == whole == theirs
    assert ours["completion_tokens"] > 5
    assert ("call" in ours) == (case == "required")


@CHAT_SERVERS
@pytest.mark.parametrize("place", [9, pytest.param(2, marks=MORE)])
def test_tokens_behind_a_stop_are_no_reasoning(
    client: Client, plain: Client, options: dict, place: int
):
    thoughts = chat(plain, chat_body())["reasoning_content"]
    start = len(thoughts) * place // 12
    stop = {"stop": [thoughts[start : start + 3]]}
    ours, whole, theirs = three_chats(client, plain, options, stop)
    assert 0 < theirs["reasoning_tokens"] <= theirs["completion_tokens"]
    assert ours == whole == theirs


# -- other APIs ---------------------------------------------------------------------------

ASKED = [{"role": "user", "content": "Start with 12"}]


def texts_of(value: Any, key: str = "") -> str:
    """All texts and thoughts in an answer, or in an event of a stream."""
    if isinstance(value, list):
        return "".join(map(texts_of, value))
    if isinstance(value, dict):
        return "".join(texts_of(inner, name) for name, inner in value.items())
    return value if key in ("text", "thinking", "delta") and isinstance(value, str) else ""


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "Start with 12", "max_tokens": 60}),
        ("/v1/messages", {"messages": ASKED, "max_tokens": 60}),
        ("/v1/responses", {"input": ASKED, "max_output_tokens": 60}),
    ],
)
def test_the_text_of(semantic: Client, path: str, asked: dict[str, Any]):
    """``semantic`` drafts for requests that cannot ask for it."""
    (model,) = HTTP.get(f"{semantic.url}/v1/models").json()["data"]
    body = {"model": model["id"], "temperature": 0, **asked}
    parts = [e for e in chunks_of(semantic, path, body) if e.get("type", "delta").endswith("delta")]
    whole = semantic.post(path, body).json()
    assert len(texts_of(whole)) > 30
    assert texts_of(parts) == texts_of(whole)


@SERVERS
@pytest.mark.parametrize("place", [30, pytest.param(12, marks=MORE)])
def test_a_session_ends_a_turn_at_its_stop(
    client: Client, plain: Client, options: dict, place: int
):
    text = plain.generate(PROMPTS[0], **LIMIT)["text"]
    start = len(text) * place // 60
    stop = LIMIT | {"stop": [text[start : start + 3]]}

    def turns(of: Client, options: dict | None) -> list[dict[str, Any]]:
        session = of.post("/open_session", {"capacity_of_str_len": 9999}).json()
        first = of.generate(
            PROMPTS[0], parse=options, top={"session_params": {"id": session}}, **stop
        )
        after = {"session_params": {"id": session, "rid": first["meta_info"]["id"]}}
        second = of.generate(PROMPTS[1], parse=options, top=after, **LIMIT)
        of.post("/close_session", {"session_id": session}).raise_for_status()
        return [first, second]

    for ours, theirs in zip(turns(client, options), turns(plain, None), strict=True):
        assert_same(ours, theirs)
        assert ours["meta_info"]["prompt_tokens"] == theirs["meta_info"]["prompt_tokens"]
