"""Parallel drafts (several tokens per draft forward) equal drafts token by token.

The random pair's draft never learned to fill masks: most of its candidates are wrong, some right
by chance; the question pair's did (test_demo_requests.py). Servers of other modules draft in
parallel too: ``token``, ``equal``, those with two ranks, adapters or an EAGLE-3 head, and some
short of KV slots. There the host waits for each block before it launches the next; here it does
not, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from support.client import (
    DRAFTS,
    EXACT,
    Client,
    draft_forwards,
    drafts_of,
    ids_of,
    parse_info,
    random_prompts,
)
from support.models import load_model

PROMPTS = random_prompts(8, seed=131)
LONG = {"max_new_tokens": 48, "ignore_eos": True}
WHOLE = {"threshold": 0.0, "trace": True, **DRAFTS}
"""Every draft is accepted: only the bonus tokens are the target's."""


MORE = pytest.mark.nightly(
    "tests/e2e/test_blocks.py::test_parallel_drafts_equal_drafts_token_by_token"
)
NEAR_TIE = 1e-4
"""Between logits: rows of one forward are rounded otherwise than rows of another."""


@pytest.fixture(scope="module")
def draft_model(pair: tuple[Path, Path]) -> Any:
    return load_model(pair[1])


def assert_same_text(
    model: Any, prompts: Sequence[list[int]], ours: Sequence[dict], theirs: Sequence[dict]
) -> None:
    """Token for token; where two answers part, the draft's logits of both tokens nearly tie."""
    for prompt, *ids in zip(prompts, ids_of(ours), ids_of(theirs), strict=True):
        if ids[0] == ids[1]:
            continue
        assert len(ids[0]) == len(ids[1])
        place = next(i for i, (one, other) in enumerate(zip(*ids, strict=True)) if one != other)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids[1][:place]]])).logits[0, -1]
        assert abs(float(logits[ids[0][place]] - logits[ids[1][place]])) < NEAR_TIE


@pytest.mark.parametrize("options", [WHOLE, {"threshold": 0.3, "trace": True}])
@pytest.mark.parametrize(
    ("concurrency", "prompts"), [(8, PROMPTS), pytest.param(1, PROMPTS[:2], marks=MORE)]
)
def test_parallel_drafts_equal_drafts_token_by_token(
    blocks: Client,
    semantic: Client,
    draft_model: Any,
    options: dict,
    concurrency: int,
    prompts: list,
):
    before = draft_forwards(blocks)
    ours, theirs = (
        server.generate_all(prompts, concurrency, parse=options, **LONG)
        for server in (blocks, semantic)
    )
    assert_same_text(draft_model, prompts, ours, theirs)
    infos = [[parse_info(answer) for answer in answers] for answers in (ours, theirs)]
    for one, other in zip(*infos, strict=True):
        assert one["drafted_tokens"] == other["drafted_tokens"] == other["draft_forwards"]
        assert other["tokens_per_draft_forward"] == 1
        assert one["draft_forwards"] <= one["drafted_tokens"]
        per_forward = one["drafted_tokens"] / one["draft_forwards"]
        assert one["tokens_per_draft_forward"] == pytest.approx(per_forward, abs=1e-3)
    # Not vacuous: some candidates were right, and masks followed the last row, or every row.
    num_forwards, num_drafted = (
        sum(info[name] for info in infos[0]) for name in ("draft_forwards", "drafted_tokens")
    )
    assert num_forwards < num_drafted or options is not WHOLE  # the longest drafts
    grown = {masks: count - before[masks] for masks, count in draft_forwards(blocks).items()}
    assert grown["none"] == 0
    assert sum(grown.values()) > 0
    assert all(draft_forwards(blocks)[masks] > 0 for masks in ("last", "every"))
    assert blocks.num_async_chunks(prompts[0], parse=options, **LONG) > 0
    blocks.assert_nothing_lost()


def test_exact_above_one(blocks: Client, plain: Client):
    answers = blocks.generate_all(PROMPTS, 8, parse=EXACT, **LONG)
    assert ids_of(answers) == ids_of(plain.generate_all(PROMPTS, 8, **LONG))


def test_a_stop_token_in_a_block_ends_the_draft(blocks: Client, semantic: Client):
    for prompt in PROMPTS[:2]:
        free = semantic.generate(prompt, parse=WHOLE, **LONG)["output_ids"]
        params = {"max_new_tokens": 40, "stop_token_ids": [free[9], free[23]]}
        ours, theirs = (c.generate(prompt, parse=WHOLE, **params) for c in (blocks, semantic))
        assert ours["output_ids"] == theirs["output_ids"]
        assert drafts_of([ours]) == drafts_of([theirs])


def test_seeded_drafts_are_those_written_one_token_at_a_time(blocks: Client, semantic: Client):
    """Noise goes by seed and position: whatever was proposed, the draw is the same. With top_k or
    top_p it would go by rank, too, which rounding changes between tokens that nearly tie."""
    params = {"temperature": 1.1, **LONG}
    runs = []
    for seed in (5, 6):
        ours, theirs = (
            server.generate_all(PROMPTS, 8, parse=WHOLE, sampling_seed=seed, **params)
            for server in (blocks, semantic)
        )
        assert drafts_of(ours) == drafts_of(theirs)
        runs.append(ids_of(ours))
    assert runs[0] != runs[1]


def test_greedy_and_sampled_requests_share_a_block(blocks: Client, semantic: Client):
    with ThreadPoolExecutor(8) as pool:
        jobs = [
            pool.submit(blocks.generate, prompt, parse=WHOLE, temperature=i % 2, **LONG)
            for i, prompt in enumerate(PROMPTS)
        ]
        answers = [job.result() for job in jobs]
    greedy = semantic.generate_all(PROMPTS[::2], 4, parse=WHOLE, **LONG)
    assert ids_of(answers[::2]) == ids_of(greedy)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("nan", "NaN in the draft model's logits"),
        ("raise", "the draft model failed: InjectedError"),
    ],
)
def test_a_fault_in_a_block_ends_its_requests(blocks: Client, kind: str, named: str):
    expected = blocks.generate(PROMPTS[0], parse=WHOLE, **LONG)["output_ids"]
    with blocks.probe.fault("draft-chunk", kind, skip=4, times=1) as fault:
        body = {"temperature": 0, "custom_params": {"parse": WHOLE}, **LONG}
        response = blocks.post("/generate", {"input_ids": PROMPTS[0], "sampling_params": body})
        assert fault.num_fired() == 1
    assert named in response.text
    blocks.assert_nothing_lost()
    assert blocks.generate(PROMPTS[0], parse=WHOLE, **LONG)["output_ids"] == expected
