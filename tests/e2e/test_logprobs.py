"""Log probabilities of drafted requests: the target's own, for draft tokens and for its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.client import EXACT, HTTP, Client, parse_info, random_prompts

PROMPTS = random_prompts(6, seed=33)
LIMIT = {"max_new_tokens": 60, "ignore_eos": True}
SAMPLED = {"temperature": 1.2, "top_k": 50, "top_p": 0.95, "sampling_seed": 5}
ASKS = {
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 3,
    "token_ids_logprob": [5, 9],
}
LESS = {"return_logprob": True}
KEYS = (
    *("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"),
    *("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"),
)


def flat(nested: Any) -> list[float]:
    """All numbers, in order."""
    if isinstance(nested, (list, tuple)):
        return [number for item in nested for number in flat(item)]
    return [float(nested)] if isinstance(nested, (int, float)) else []


def generate_mixed(client: Client, **kwargs: Any) -> list[dict]:
    """Answers to all prompts at once: with everything, with less, and without log probabilities."""
    tops = [ASKS, LESS, None, ASKS, None, LESS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        jobs = [
            pool.submit(client.generate, prompt, top=top, **LIMIT, **kwargs)
            for prompt, top in zip(PROMPTS, tops, strict=True)
        ]
        return [job.result() for job in jobs]


@pytest.mark.parametrize(
    ("server", "options"),
    [("token", {}), ("semantic", EXACT), ("overlap", EXACT), ("blocks", EXACT)],
)
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_equal_the_plain_servers(
    request: pytest.FixtureRequest, plain: Client, server: str, options: dict, sampling: dict
):
    client: Client = request.getfixturevalue(server)
    answers = generate_mixed(client, parse=options, **sampling)
    for ours, theirs in zip(answers, generate_mixed(plain, **sampling), strict=True):
        assert ours["output_ids"] == theirs["output_ids"]
        assert (info := parse_info(ours))["mode"] == "parse"
        assert info["rounds"] > 1
        for key in KEYS:
            assert (key in ours["meta_info"]) == (key in theirs["meta_info"])
            left, right = (flat(answer["meta_info"].get(key)) for answer in (ours, theirs))
            assert left == pytest.approx(right, abs=1e-4)
        assert len(flat(ours["meta_info"].get("output_token_logprobs"))) in (0, 120)
    if server == "token":
        assert all(parse_info(answer)["accepted_tokens"] > 0 for answer in answers)
    client.assert_nothing_lost()


@pytest.mark.parametrize("server", ["semantic", "overlap", "blocks"])
def test_of_accepted_tokens_are_the_targets(
    request: pytest.FixtureRequest, plain: Client, server: str
):
    """Of tokens that the target would not have written, too: as the plain server scores them."""
    client: Client = request.getfixturevalue(server)
    answers = client.generate_all(PROMPTS, 6, parse={"threshold": 0.3}, top=ASKS, **LIMIT)
    num_others = 0
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        start = len(prompt) - 1
        scored = plain.generate(
            [*prompt, *answer["output_ids"]],
            top={**ASKS, "logprob_start_len": start},
            max_new_tokens=1,
        )["meta_info"]
        ours = answer["meta_info"]
        for kind in ("token", "top", "token_ids"):
            name = f"put_{kind}_logprobs"
            left, right = flat(ours[f"out{name}"]), flat(scored[f"in{name}"][1:])
            if kind == "token":  # SGLang shows a prompt's token as 0 where it is the last id
                left, right = left[::2], right[::2]
            assert left == pytest.approx(right, abs=1e-4)
        num_others += sum(
            token != top[0][1]
            for (_, token, _), top in zip(
                ours["output_token_logprobs"], ours["output_top_logprobs"], strict=True
            )
        )
        assert parse_info(answer)["accepted_tokens"] > 0
    assert num_others > 10  # not vacuous: accepted tokens that the target would not have chosen


def _chunks(client: Client, path: str, body: dict) -> Iterator[dict]:
    with HTTP.stream("POST", f"{client.url}{path}", json={**body, "stream": True}) as response:
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if data and data != "[DONE]":
                yield json.loads(data)


def test_streams_say_the_same(semantic: Client):
    """In the native API every chunk repeats what came before."""
    params = {"temperature": 0, **LIMIT, "custom_params": {"parse": {"threshold": 0.3}}}
    body = {"input_ids": PROMPTS[0], "sampling_params": params, **ASKS}
    whole = semantic.post("/generate", body).json()
    *_, last = _chunks(semantic, "/generate", body)
    assert last["output_ids"] == whole["output_ids"]
    for key in KEYS:
        ours, theirs = flat(last["meta_info"][key]), flat(whole["meta_info"][key])
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert len(last["meta_info"]["output_token_logprobs"]) == LIMIT["max_new_tokens"]


def _chat_logprobs(chunks: Sequence[dict], part: str) -> tuple[str, list[dict]]:
    """Text and entries of a chat answer, whole or in chunks."""
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    text = "".join(choice[part].get("content") or "" for choice in choices)
    found = [c["logprobs"]["content"] for c in choices if c.get("logprobs")]
    return text, [entry for entries in found for entry in entries]


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_openai(demo: Client, demo_plain: Client, problems: list, is_stream: bool):
    body = {
        "model": "any",
        "messages": [{"role": "user", "content": problems[0].prompt}],
        "temperature": 0,
        "max_tokens": 80,
        "logprobs": True,
        "top_logprobs": 2,
    }
    found = []
    for client, options in ((demo, {"custom_params": {"parse": EXACT}}), (demo_plain, {})):
        if is_stream:
            chunks = [*_chunks(client, "/v1/chat/completions", {**body, **options})]
            found.append(_chat_logprobs(chunks, "delta"))
        else:
            answer = client.post("/v1/chat/completions", {**body, **options}).json()
            found.append(_chat_logprobs([answer], "message"))
    (text, entries), (expected, plain_entries) = found
    assert text == expected
    assert [entry["token"] for entry in entries] == [entry["token"] for entry in plain_entries]
    ours, theirs = (
        flat([[e["logprob"], [top["logprob"] for top in e["top_logprobs"]]] for e in part])
        for part in (entries, plain_entries)
    )
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert len(ours) > 100
