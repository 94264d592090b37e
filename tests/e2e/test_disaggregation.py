"""A PARSE decode server behind a stock server that prefills: plain answers, and no slot is lost.

The KV of prompts really moves between two processes; the draft model prefills from token ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from support.bodies import PLAIN, TRACE, abort_while, assert_token_mode
from support.client import (
    assert_all_kinds_of_drafts,
    drafts_of,
    ids_of,
    parse_info,
    random_prompts,
    retractions,
)
from support.disaggregated import SplitClient, split_servers
from support.families import TINY, cpu_kernels
from support.models import load_model
from support.reference_verdicts import assert_chosen, assert_likelihoods
from support.servers import OVERLAP, SEED, Start, parse_flags, two_ranks_environment

LIMIT = {"max_new_tokens": 40, "ignore_eos": True}
TOKEN = ("--parse-verification", "token", "--parse-draft-tokens", "8", *SEED)
JSON = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
MORE = pytest.mark.nightly("tests/e2e/test_disaggregation.py::test_token_mode")
KINDS = ("on", "two-ranks", "deepseek-v2", "gemma-3")


@pytest.fixture(scope="module", params=["off", *(pytest.param(k, marks=MORE) for k in KINDS)])
def kind(request: pytest.FixtureRequest) -> str:
    """Without the overlap schedule, with it, on two ranks, or a family with other attention."""
    return request.param


@pytest.fixture(scope="module")
def models(
    kind: str, pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    return TINY[kind].pair(tmp_path_factory.mktemp(kind)) if kind in TINY else pair


@pytest.fixture(scope="module")
def split(start_server: Start, kind: str, models: tuple[Path, Path]) -> Iterator[SplitClient]:
    """In token mode."""
    of_family = TINY[kind].flags if kind in TINY else ()
    more = {"on": OVERLAP, "two-ranks": ("--tp-size", "2")}.get(kind, of_family)
    flags = parse_flags(models, *TOKEN, *more)
    servers = split_servers(start_server, models[0], f"decode-{kind}", flags, of_family)
    kernels = cpu_kernels(kind) if kind in TINY else nullcontext()
    with kernels, two_ranks_environment() if kind == "two-ranks" else nullcontext():
        yield from servers


@pytest.mark.parametrize(("concurrency", "count"), [(1, 2), (8, 16)])
def test_token_mode(split: SplitClient, models: tuple[Path, Path], concurrency: int, count: int):
    prompts, answers = assert_token_mode(split, concurrency, count, **LIMIT)
    if concurrency > 1:
        assert_all_kinds_of_drafts(answers)
        return
    assert_chosen(load_model(models[0]), prompts[0], answers[0]["output_ids"])


def test_the_same_prompts_again(split: SplitClient):
    """The prefill server's prefix cache has them: what it counts as cached has no draft KV here,
    though the slots had some of earlier requests."""
    prompts = random_prompts(4, 65)
    first = split.generate_all(prompts, 4, **LIMIT, parse=TRACE)
    again = split.generate_all(prompts, 4, **LIMIT, parse=TRACE)
    assert ids_of(again) == ids_of(first)
    assert drafts_of(again) == drafts_of(first)
    assert all(answer["meta_info"]["cached_tokens"] for answer in again)
    split.assert_nothing_lost()


def test_log_probabilities(split: SplitClient):
    """The first token's come with the KV, the others' are this server's."""
    top = {"return_logprob": True, "top_logprobs_num": 2}
    prompt = random_prompts(1, 67)[0]
    plain, drafted = (
        split.generate(prompt, **LIMIT, parse=options, top=top)["meta_info"]
        for options in (PLAIN, TRACE)
    )
    for name in ("output_token_logprobs", "output_top_logprobs"):
        assert len(drafted[name]) == LIMIT["max_new_tokens"]
    for ours, theirs in zip(
        *(one["output_token_logprobs"] for one in (drafted, plain)), strict=True
    ):
        assert ours[1] == theirs[1]
        assert ours[0] == pytest.approx(theirs[0], abs=1e-4)


def test_answers_that_end_with_their_first_token(split: SplitClient):
    prompt = random_prompts(1, 69)[0]
    one = split.generate(prompt, max_new_tokens=1, ignore_eos=True, parse=TRACE)
    stop = {"max_new_tokens": 9, "stop_token_ids": one["output_ids"]}
    stopped = split.generate(prompt, **stop, parse=TRACE)
    assert stopped["output_ids"] == one["output_ids"]
    assert stopped["meta_info"]["finish_reason"]["type"] == "stop"
    split.assert_nothing_lost()


def test_a_grammar(split: SplitClient):
    """Its matcher has accepted the prefill server's token when the walk starts."""
    for prompt in random_prompts(3, 73):
        limit = {"max_new_tokens": 30, "json_schema": JSON}
        plain, drafted = (
            split.generate(prompt, **limit, parse=options) for options in (PLAIN, TRACE)
        )
        assert drafted["output_ids"] == plain["output_ids"]
        assert drafted["text"].lstrip().startswith("{")


def test_a_prediction_is_drafted_at_once(split: SplitClient):
    prompt = random_prompts(1, 75)[0]
    known = split.generate(prompt, **LIMIT, parse=PLAIN)
    answer = split.generate(prompt, **LIMIT, parse={**TRACE, "draft": known["text"]})
    assert answer["output_ids"] == known["output_ids"]
    assert "prediction" in parse_info(answer)["sources"]


def test_slots_come_back_after_an_abort(split: SplitClient):
    prompt = random_prompts(1, 81)[0]
    abort_while(split, "target-verify", {"prompt": prompt, "parse": TRACE, **LIMIT})
    split.assert_nothing_lost()


def test_retracted_requests_go_on_with_their_kv(split: SplitClient):
    """SGLang keeps the target's KV on the host; the draft model's is made anew."""
    prompts = random_prompts(6, 83)
    limit = {"max_new_tokens": 60, "ignore_eos": True}
    expected = split.generate_all(prompts, 6, **limit, parse=PLAIN)
    with retractions(split):
        answers = split.generate_all(prompts, 6, **limit, parse=TRACE)
    assert ids_of(answers) == ids_of(expected)
    assert sum(answer["meta_info"].get("num_retractions", 0) for answer in answers) > 0
    split.assert_nothing_lost()


@pytest.fixture(scope="module")
def judged(start_server: Start, pair: tuple[Path, Path]) -> Iterator[SplitClient]:
    """With the likelihood as judge."""
    flags = ("--parse-judge", "likelihood", "--parse-segment", "tokens:3", *SEED)
    flags = parse_flags(pair, *flags, "--parse-draft-tokens", "12")
    yield from split_servers(start_server, pair[0], "decode-judged", flags, ())


@MORE
def test_verdicts_are_those_of_transformers(judged: SplitClient, pair: tuple[Path, Path]):
    """From the first draft on, whose prompt this server has not seen."""
    model, compared = load_model(pair[0]), 0
    for prompt in random_prompts(3, 91):
        answer = judged.generate(prompt, **LIMIT, parse=TRACE)
        compared += assert_likelihoods(model, prompt, answer)
    assert compared > 10
