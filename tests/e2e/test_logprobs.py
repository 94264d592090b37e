"""Log probabilities of drafted requests: the target's own, for draft tokens and for its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.client import DRAFTS, EXACT, Client, chunks_of, flat, parse_info, random_prompts

PROMPTS = random_prompts(6, seed=33)
LIMIT = {"max_new_tokens": 40, "ignore_eos": True}
SAMPLED = {"temperature": 1.2, "top_k": 50, "top_p": 0.95, "sampling_seed": 5}
ASKS = {
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 3,
    "token_ids_logprob": [5, 9],
}
MORE = pytest.mark.nightly("tests/e2e/test_logprobs.py::test_equal_the_plain_servers")
LESS = {"return_logprob": True}
KEYS = (
    *("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"),
    *("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"),
)


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
    ("server", "options", "sampling"),
    [
        *(("token", {}, {}), ("token", {}, SAMPLED), ("blocks", EXACT, {})),
        pytest.param("blocks", EXACT, SAMPLED, marks=MORE),
        *(
            pytest.param(server, EXACT, sampling, marks=MORE)
            for server in ("semantic", "overlap")
            for sampling in ({}, SAMPLED)
        ),
    ],
)
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
        assert len(flat(ours["meta_info"].get("output_token_logprobs"))) in (0, 80)
    if server == "token":
        assert all(parse_info(answer)["accepted_tokens"] > 0 for answer in answers)
    client.assert_nothing_lost()


@pytest.mark.parametrize(
    "server", ["overlap", *(pytest.param(server, marks=MORE) for server in ("semantic", "blocks"))]
)
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


def test_streams_say_the_same(semantic: Client):
    """In the native API every chunk repeats what came before."""
    params = {"temperature": 0, **LIMIT, "custom_params": {"parse": {"threshold": 0.3, **DRAFTS}}}
    body = {"input_ids": PROMPTS[0], "sampling_params": params, **ASKS}
    whole = semantic.post("/generate", body).json()
    *_, last = chunks_of(semantic, "/generate", body)
    assert last["output_ids"] == whole["output_ids"]
    for key in KEYS:
        ours, theirs = flat(last["meta_info"][key]), flat(whole["meta_info"][key])
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert len(last["meta_info"]["output_token_logprobs"]) == LIMIT["max_new_tokens"]
