"""PARSE on a GPU at real sizes: 64 requests, long prompts, passes of more rows than a prefill
chunk, sampling, few slots, many turns, other kernels, NaN. Also checks that graphs are replayed and
that launching a draft chunk waits for nothing.

Answers are compared as in ``test_servers``, against the plain target on the same attention backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.client import EXACT, parse_info, random_prompts
from support.demo_pair import DEMO
from support.gpu_setups import ALL_REPLAY, BACKENDS, REAL_SIZES, VARIANTS, Setup
from support.random_pair import parallel_draft
from support.servers import BLOCKS, QUESTION, SEMANTIC, Start, parse_flags, plain_flags, served
from support.verified_tokens import gaps

NEAR_TIE = 0.15
"""As in ``test_servers``."""
LONG = (8, 500, 6000, 30000)
"""Tokens of the prompts."""
TOKEN = ("--parse-verification", "token", "--parse-draft-tokens", "64")
STRICT = {"PARSE_PROBE_STRICT": "1"}


def only(*setups: Setup) -> Any:
    return pytest.mark.parametrize("setup", setups, ids=str, indirect=True)


@pytest.fixture
def plain(start_server: Start, random_pair: tuple[Path, Path], setup: Setup) -> Iterator[Any]:
    long = ("--max-total-tokens", "200000", "--context-length", "36864")
    flags = (*plain_flags(random_pair[0]), *Setup(setup.backend, "", long).on_gpu)
    yield from served(start_server, f"plain-{setup.backend}-long", *flags)


@pytest.fixture
def token(start_server: Start, random_pair: tuple[Path, Path], setup: Setup) -> Iterator[Any]:
    """Drafts of 64 in chunks of 16."""
    flags = parse_flags(random_pair, *TOKEN, *setup.on_gpu)
    yield from served(start_server, f"token {setup}".replace(" ", "-"), *flags)


@pytest.fixture
def strict(start_server: Start, random_pair: tuple[Path, Path], setup: Setup) -> Iterator[Any]:
    """As ``token``; a draft chunk whose launch waits for the GPU fails."""
    flags = parse_flags(random_pair, *TOKEN, *setup.on_gpu)
    yield from served(start_server, f"strict {setup}".replace(" ", "-"), *flags, **STRICT)


@pytest.fixture
def strict_blocks(
    start_server: Start, random_pair: tuple[Path, Path], setup: Setup, tmp_path: Path
) -> Iterator[Any]:
    """As ``strict``; drafts are written in blocks."""
    draft = parallel_draft(random_pair[1], tmp_path / "masks")
    flags = parse_flags((random_pair[0], draft), *TOKEN, *BLOCKS, *setup.on_gpu)
    yield from served(start_server, f"blocks {setup}".replace(" ", "-"), *flags, **STRICT)


@pytest.fixture
def short(start_server: Start, random_pair: tuple[Path, Path], setup: Setup) -> Iterator[Any]:
    """Drafts of 16, whose passes are one graph each."""
    drafts = ("--parse-verification", "token", "--parse-draft-tokens", "16")
    flags = parse_flags(random_pair, *drafts, *setup.on_gpu)
    name = f"short {setup}".replace(" ", "-")
    yield from served(start_server, name, *flags, SGLANG_PARSE_PASS_GRAPHS="1", **STRICT)


@pytest.fixture
def semantic(start_server: Start, random_pair: tuple[Path, Path], setup: Setup) -> Iterator[Any]:
    flags = parse_flags(random_pair, *SEMANTIC, *setup.on_gpu)
    yield from served(start_server, f"semantic {setup}".replace(" ", "-"), *flags)


@pytest.fixture
def equal(start_server: Start, random_pair: tuple[Path, Path], setup: Setup) -> Iterator[Any]:
    """The draft model is the target."""
    flags = parse_flags((random_pair[0], random_pair[0]), *TOKEN, *setup.on_gpu)
    yield from served(start_server, f"equal {setup}".replace(" ", "-"), *flags)


def assert_the_targets(plain: Any, prompts: list, answers: list[dict]) -> None:
    for prompt, answer in zip(prompts, answers, strict=True):
        found = gaps(plain, prompt, answer["output_ids"])
        assert max(found) < NEAR_TIE, found


def prompts_of(*lengths: int) -> list[list[int]]:
    """Short random texts, each repeated up to a length."""
    texts = random_prompts(len(lengths), 100)
    return [(text * length)[:length] for text, length in zip(texts, lengths, strict=True)]


# -- launches -------------------------------------------------------------------------


@only(*(Setup(backend, "auto", ALL_REPLAY) for backend in BACKENDS))
def test_steps_replay_graphs_and_chunks_wait_for_nothing(plain: Any, strict: Any):
    """Also after an accepted draft, when the draft extends its KV."""
    prompts = random_prompts(16, 92)
    answers = strict.generate_all(prompts, 16, max_new_tokens=96, ignore_eos=True)
    assert_the_targets(plain, prompts, answers)
    seen = strict.look()
    assert seen["forwards"]["draft-chunk graph"] > 20
    for place in ("draft-prefill", "draft-chunk", "target-decode", "target-verify"):
        assert not seen["forwards"].get(f"{place} eager"), place
    assert seen["overlap"]["async_chunks"] > 0
    strict.assert_nothing_lost()


@only(*(Setup(backend, "auto") for backend in ("triton", "fa3", "flashinfer")))
def test_blocks_replay_graphs_and_wait_for_nothing(plain: Any, strict_blocks: Any):
    """Whatever the target's attention backend: the draft model's is Triton beside FlashInfer."""
    prompts = random_prompts(16, 94)
    answers = strict_blocks.generate_all(prompts, 16, max_new_tokens=96, ignore_eos=True)
    assert_the_targets(plain, prompts, answers)
    seen = strict_blocks.look()
    assert seen["forwards"]["draft-chunk graph"] > 20
    assert not seen["forwards"].get("draft-chunk eager")
    assert seen["overlap"]["async_chunks"] > 0
    strict_blocks.assert_nothing_lost()


@only(Setup("triton", "auto"), Setup("flashinfer", "auto"))
@pytest.mark.parametrize("concurrency", [1, 16])
def test_passes_of_few_rows_are_one_graph(plain: Any, short: Any, concurrency: int):
    """None runs in pieces, so SGLang's runner sees decode steps only."""
    prompts = random_prompts(16, 95)
    answers = short.generate_all(prompts, concurrency, max_new_tokens=96, ignore_eos=True)
    assert_the_targets(plain, prompts, answers)
    assert all(parse_info(answer)["rounds"] > 1 for answer in answers)
    assert not [place for place in short.look()["forwards"] if place.startswith("target-verify")]
    short.assert_nothing_lost()


# -- sizes ----------------------------------------------------------------------------


@only(*REAL_SIZES)
def test_64_at_a_time_in_passes_of_many_rows(plain: Any, semantic: Any):
    """64 drafts of 20 with 7 questions: more rows than one pass may have."""
    prompts = random_prompts(64, 93)
    answers = semantic.generate_all(prompts, 64, parse=EXACT, max_new_tokens=48, ignore_eos=True)
    assert_the_targets(plain, prompts[::8], answers[::8])
    assert all(parse_info(answer)["rounds"] > 1 for answer in answers)
    assert not semantic.look()["forwards"].get("draft-chunk eager")
    semantic.assert_nothing_lost()


@only(*REAL_SIZES)
def test_64_at_a_time_in_token_mode(plain: Any, token: Any):
    prompts = random_prompts(64, 94)
    answers = token.generate_all(prompts, 64, max_new_tokens=96, ignore_eos=True)
    assert_the_targets(plain, prompts[::8], answers[::8])
    token.assert_nothing_lost()


@only(*REAL_SIZES)
def test_long_prompts_batched_with_short_ones(plain: Any, semantic: Any):
    prompts = prompts_of(*LONG)
    answers = semantic.generate_all(prompts, 4, parse=EXACT, max_new_tokens=48, ignore_eos=True)
    assert_the_targets(plain, prompts, answers)
    semantic.assert_nothing_lost()


# -- ways -----------------------------------------------------------------------------


@only(VARIANTS["tight"])
def test_few_slots(plain: Any, semantic: Any):
    """Drafts are ended early or given up; answers stay the target's."""
    prompts = random_prompts(24, 95)
    answers = semantic.generate_all(prompts, 24, parse=EXACT, max_new_tokens=72, ignore_eos=True)
    assert_the_targets(plain, prompts, answers)
    assert sum(parse_info(answer)["kv_truncated_drafts"] for answer in answers) > 0
    semantic.assert_nothing_lost()


@only(VARIANTS["sampler"])
def test_sampled_requests_batched_with_greedy_ones(plain: Any, token: Any):
    prompts = random_prompts(16, 96)
    sampled = {"temperature": 0.8, "top_p": 0.9, "top_k": 40}

    def ask(number: int) -> dict:
        how = sampled if number % 2 else {}
        return token.generate(prompts[number], max_new_tokens=64, ignore_eos=True, **how)

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))
    assert_the_targets(plain, prompts[::2], answers[::2])
    assert all(len(answer["output_ids"]) == 64 for answer in answers)
    token.assert_nothing_lost()


@only(*(Setup(backend, "auto") for backend in BACKENDS))
def test_the_next_turns_draft_from_whole_kv(equal: Any):
    """Whatever is not accepted was drafted from wrong KV, but for ties of two tokens."""
    turns = random_prompts(8, 97)
    for _ in range(4):
        answers = equal.generate_all(turns, 8, max_new_tokens=40, ignore_eos=True)
        accepted = sum(parse_info(answer)["accepted_tokens"] for answer in answers)
        assert accepted > 0.9 * sum(parse_info(answer)["drafted_tokens"] for answer in answers)
        turns = [
            [*turn, *answer["output_ids"], 5, 6, 7]
            for turn, answer in zip(turns, answers, strict=True)
        ]
    assert all(answer["meta_info"]["cached_tokens"] > 0 for answer in answers)
    equal.assert_nothing_lost()


@only(VARIANTS["deterministic"])
def test_verdicts_do_not_depend_on_who_else_is_there(semantic: Any):
    prompts = random_prompts(12, 98)
    options = {"parse": {"threshold": 0.3, "trace": True}, "max_new_tokens": 40, "ignore_eos": True}
    alone, together = (semantic.generate_all(prompts, n, **options) for n in (1, 12))
    for one, other in zip(alone, together, strict=True):
        first, second = (parse_info(answer)["trace"][0] for answer in (one, other))
        assert first["draft_token_ids"] == second["draft_token_ids"]
        assert first["verdicts"] == second["verdicts"]


@only(VARIANTS["fp8 kv"])
def test_kv_in_fp8(start_server: Start, setup: Setup, problems: list):
    """The trained pair: most answers come from the draft and are right."""
    flags = parse_flags((DEMO / "target", DEMO / "draft"), *QUESTION, *setup.on_gpu)
    for demo in served(start_server, "demo-fp8-kv", *flags):
        answers = demo.generate_all([p.prompt for p in problems[:32]], 16, max_new_tokens=256)
        right = sum(p.is_right(a["text"]) for p, a in zip(problems, answers, strict=False))
        assert right / len(answers) >= 0.85
        demo.assert_nothing_lost()


@only(*(Setup(backend, "auto") for backend in BACKENDS))
@pytest.mark.parametrize("place", ["draft-chunk", "target-verify"])
def test_nan_ends_one_request(token: Any, place: str):
    """On the device it is only marked: the others' tokens are theirs."""
    prompts = random_prompts(6, 99)
    limit = {"max_new_tokens": 60, "ignore_eos": True}

    def ask(prompt: list[int]) -> str:
        try:
            return f"{len(token.generate(prompt, **limit)['output_ids'])} tokens"
        except httpx.HTTPStatusError as error:
            return error.response.text

    with token.probe.fault(place, "nan", times=1), ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(ask, prompts))
    assert texts.count("60 tokens") == 5
    assert sum("NaN" in text for text in texts) == 1
    token.assert_nothing_lost()
