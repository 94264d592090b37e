"""Penalties, ``min_new_tokens``, ``logit_bias`` and custom logit processors: drafted and verified
under them, in a batch of all of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.sampling.custom_logit_processor import (
    CustomLogitProcessor,
    DeepseekOCRNoRepeatNGramLogitProcessor,
    DisallowedTokensLogitsProcessor,
)

from support.client import EXACT, Client, parse_info, random_prompts
from support.models import load_model

PROMPTS = random_prompts(2, seed=34)
LIMIT = {"max_new_tokens": 32, "ignore_eos": True}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.2, "top_k": 50, "top_p": 0.95, "sampling_seed": 5},
}
SERVERS = ("token", "semantic", "overlap", "blocks")
MORE = pytest.mark.nightly("tests/e2e/test_adjusted.py::test_output_equals_the_plain_servers")


class AllowsNoRepeat(CustomLogitProcessor):
    """Bans all tokens of the answer so far; not known to be pure."""

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        for row, params in enumerate(custom_param_list):
            logits[row, list(params["__req__"].output_ids)] = -float("inf")
        return logits


def processor(kind: type[CustomLogitProcessor], **params: Any) -> dict[str, Any]:
    """Sampling parameters, and ``top`` of the request."""
    return {"custom_params": params, "top": {"custom_logit_processor": kind.to_str()}}


CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "frequency penalty": {"frequency_penalty": 0.7},
    "presence penalty": {"presence_penalty": 0.9},
    "repetition penalty": {"repetition_penalty": 1.4},
    # Not with a repetition penalty: without overlap, the order in which SGLang applies it and these
    # varies from process to process (a set of classes). PARSE's is that of its overlap schedule.
    "two penalties": {"frequency_penalty": 0.3, "presence_penalty": 0.3},
    "min_new_tokens": {"min_new_tokens": 20, "ignore_eos": False, "stop_token_ids": [*range(99)]},
    "logit_bias": {"logit_bias": {"17": 2.0, "23": -100}},
    "with log probabilities": {
        "repetition_penalty": 1.4,
        "top": {"return_logprob": True, "top_logprobs_num": 2},
    },
    "disallowed tokens": processor(DisallowedTokensLogitsProcessor, token_ids=[*range(3, 150)]),
    "no repeated pairs": processor(
        DeepseekOCRNoRepeatNGramLogitProcessor, ngram_size=2, window_size=100
    ),
}
LOGPROBS = ("output_token_logprobs", "output_top_logprobs")


def answers_to_all(client: Client, parse: dict | None, **more: Any) -> dict[str, list[dict]]:
    """All cases of all prompts at once."""
    with ThreadPoolExecutor(len(CASES) * len(PROMPTS)) as pool:
        jobs = {}
        for name, case in CASES.items():
            params = LIMIT | more | case
            if parse is not None:
                given = params.get("custom_params", {})
                params["custom_params"] = given | {"parse": parse}
            jobs[name] = [pool.submit(client.generate, prompt, **params) for prompt in PROMPTS]
        return {name: [job.result() for job in made] for name, made in jobs.items()}


@pytest.fixture(scope="module")
def expected(plain: Client) -> Callable[[str], dict[str, list[dict]]]:
    """Kind of sampling -> what the plain server answers to all cases."""
    return cache(lambda kind: answers_to_all(plain, None, **SAMPLING[kind]))


@pytest.mark.parametrize(
    ("server", "kind"),
    [
        *(("token", "greedy"), ("blocks", "greedy")),
        *(pytest.param(server, "greedy", marks=MORE) for server in ("semantic", "overlap")),
        *(pytest.param(server, "sampled", marks=MORE) for server in SERVERS),
    ],
)
def test_output_equals_the_plain_servers(
    request: pytest.FixtureRequest, expected: Callable, server: str, kind: str
):
    client: Client = request.getfixturevalue(server)
    options, theirs_by_case = {} if server == "token" else EXACT, expected(kind)
    accepted = 0
    for name, answers in answers_to_all(client, options, **SAMPLING[kind]).items():
        for ours, theirs in zip(answers, theirs_by_case[name], strict=True):
            assert ours["output_ids"] == theirs["output_ids"], name
            assert ours["meta_info"]["finish_reason"] == theirs["meta_info"]["finish_reason"]
            info = parse_info(ours)
            assert info["mode"] == "parse"
            assert info["rounds"] > 0
            for key in LOGPROBS:
                left, right = (numbers(answer["meta_info"].get(key)) for answer in (ours, theirs))
                assert left == pytest.approx(right, abs=1e-4)
        accepted = sum(parse_info(answer)["accepted_tokens"] for answer in answers)
        assert accepted > 0 or server != "token", name
        # Not vacuous: the case changes the output.
        is_same = [a["output_ids"] for a in answers] == [
            a["output_ids"] for a in theirs_by_case["none"]
        ]
        assert is_same == (name == "none")
    client.assert_nothing_lost()


@pytest.mark.parametrize("server", ["token", "plain"])
def test_a_frequency_penalty_by_hand(
    request: pytest.FixtureRequest, pair: tuple[Path, Path], server: str
):
    """Greedy by transformers, 1.1 less for each time that a token was written. Stock SGLang writes
    the same without overlap only (docs/fidelity.md)."""
    client: Client = request.getfixturevalue(server)
    model = load_model(pair[0])
    written: list[int] = []
    counts = torch.zeros(model.config.vocab_size)
    new, cache = PROMPTS[0], None
    for _ in range(110):
        with torch.no_grad():
            step = model(torch.tensor([new]), past_key_values=cache, use_cache=True)
        new, cache = [int((step.logits[0, -1] - 1.1 * counts).argmax())], step.past_key_values
        counts[new] += 1
        written += new
    limit = {"max_new_tokens": 110, "ignore_eos": True, "frequency_penalty": 1.1}
    assert client.generate(PROMPTS[0], **limit)["output_ids"] == written
    client.assert_nothing_lost()


def numbers(nested: Any) -> list[float]:
    if isinstance(nested, list):
        return [number for item in nested for number in numbers(item)]
    return [nested] if isinstance(nested, (int, float)) else []


@pytest.mark.parametrize(
    "server", ["blocks", *(pytest.param(server, marks=MORE) for server in ("semantic", "overlap"))]
)
def test_accepted_drafts_obey_them(request: pytest.FixtureRequest, server: str):
    """Accepted tokens are the draft's, which was written under the same adjustments."""
    client: Client = request.getfixturevalue(server)
    answers = answers_to_all(client, {"threshold": 0.0})
    for name, made in answers.items():
        for answer in made:
            info, ids = parse_info(answer), answer["output_ids"]
            assert info["accepted_tokens"] > 0
            if name == "logit_bias":
                assert 23 not in ids
            elif name == "disallowed tokens":
                assert not set(ids) & {*range(3, 150)}
            elif name == "no repeated pairs":
                pairs = [*zip(ids, ids[1:], strict=False)]
                assert len({*pairs}) == len(pairs)
            elif name == "min_new_tokens":
                assert len(ids) >= 20
    for number in range(len(PROMPTS)):
        distinct = {name: len({*answers[name][number]["output_ids"]}) for name in CASES}
        assert distinct["repetition penalty"] >= distinct["none"]


def test_processors_that_may_not_be_pure_stay_plain(token: Client, plain: Client):
    case = LIMIT | processor(AllowsNoRepeat)
    ours, theirs = token.generate(PROMPTS[0], **case), plain.generate(PROMPTS[0], **case)
    assert ours["output_ids"] == theirs["output_ids"]
    assert len({*ours["output_ids"]}) == LIMIT["max_new_tokens"]
    info = parse_info(ours)
    assert (info["mode"], info["reason"]) == ("plain", "custom logit processor")
