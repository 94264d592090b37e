"""The draft kind with the lowest cost at the current load."""

import math
from collections import Counter

import pytest

from sglang_parse.core.block import BlockKind, block_kinds
from sglang_parse.core.policy.constants import DEFAULTS
from sglang_parse.core.policy.costs import BlockChoice
from sglang_parse.core.stage import Stage, StageTime

pytestmark = pytest.mark.unit

TRIALS = 1 + DEFAULTS.cold_forwards
"""Chunks of a kind until its cost at a load is known."""
EVERY, LAST, ONE = block_kinds(8, allow_one_token=True)


def draft_time(kind: BlockKind, num_requests: int, ms_per_token: float) -> StageTime:
    return StageTime(Stage.DRAFT, num_requests, 16.0, 16 * ms_per_token, num_forwards=4, kind=kind)


def run(kinds: BlockChoice, costs: dict, num_requests: int, num_chunks: int) -> Counter:
    """Draft chunks by kind; ``costs``: kind -> (ms per token, the same per request)."""
    used: Counter = Counter()
    for _ in range(num_chunks):
        kind = kinds.choose(num_requests)
        used[kind] += 1
        base, slope = costs[kind]
        kinds.observe(draft_time(kind, num_requests, base + slope * num_requests))
    return used


def test_candidate_layouts():
    assert [str(kind) for kind in (EVERY, LAST, ONE)] == [
        "8 tokens per forward, masks after every row",
        "8 tokens per forward, masks after the last row",
        "one token per forward",
    ]
    assert [kind.lookahead_rows for kind in (EVERY, LAST, ONE)] == [63, 14, 0]
    assert block_kinds(8, allow_one_token=False) == (EVERY, LAST)
    assert block_kinds(1, allow_one_token=False) == (ONE,)


def test_the_cheapest_layout_at_the_current_load_is_used():
    """Masks after every row are cheap for one request and expensive for eight."""
    costs = {EVERY: (0.2, 0.2), LAST: (0.5, 0.05), ONE: (2.0, 0.0)}
    kinds = BlockChoice((EVERY, LAST, ONE), DEFAULTS)
    assert run(kinds, costs, 1, 3 * TRIALS) == dict.fromkeys(costs, TRIALS)
    assert run(kinds, costs, 1, 64)[EVERY] >= 62
    assert kinds.current == EVERY
    assert kinds.per_token(1) == pytest.approx(0.4)
    assert run(kinds, costs, 8, 3 * TRIALS) == dict.fromkeys(costs, TRIALS)
    assert run(kinds, costs, 8, 64)[LAST] >= 62
    assert kinds.current == LAST


def test_chunks_that_measure_a_layout_are_short():
    """A whole draft of single tokens would take the time of ten of blocks."""
    kinds, probes = BlockChoice((EVERY, LAST, ONE), DEFAULTS), []
    costs = {EVERY: (0.2, 0.0), LAST: (0.5, 0.0), ONE: (2.0, 0.0)}
    for _ in range(3 * TRIALS + 2 * DEFAULTS.retry_every):
        run(kinds, costs, 1, 1)
        probes.append(kinds.probe_tokens)
    assert probes[: 3 * TRIALS] == [DEFAULTS.probe_tokens] * 3 * TRIALS
    assert Counter(probes[3 * TRIALS :]) == {0: 2 * DEFAULTS.retry_every - 2, 16: 2}


def test_first_chunks_are_not_counted():
    """They compile."""
    kinds = BlockChoice((EVERY, LAST), DEFAULTS)
    assert kinds.observe(draft_time(EVERY, 1, 999.0)) is None
    assert kinds.per_token(1) == math.inf
    for _ in range(TRIALS):
        kinds.observe(draft_time(EVERY, 1, 1.0))
    assert kinds.per_token(1) == pytest.approx(1.0)


def test_what_lost_is_tried_again():
    """Costs change."""
    kinds, every = BlockChoice((EVERY, LAST), DEFAULTS), DEFAULTS.retry_every
    run(kinds, {EVERY: (1.0, 0.0), LAST: (1.2, 0.0)}, 1, 12)
    assert kinds.current == EVERY
    costs = {EVERY: (1.0, 0.0), LAST: (0.3, 0.0)}
    assert run(kinds, costs, 1, 2 * every)[LAST] >= every
    assert kinds.current == LAST


def test_the_last_tokens_of_drafts_say_little():
    """A forward that may accept eight tokens costs as much where a draft ends after one."""
    kinds = BlockChoice((EVERY, LAST), DEFAULTS)
    for kind, lengths in ((EVERY, (9, 1, 1, 1, 80)), (LAST, (9, 40, 40))):
        for num_tokens in lengths:
            num_forwards = -(-num_tokens // (5 if kind is EVERY else 3))
            times = (num_tokens, (4.0 if kind is EVERY else 3.0) * num_forwards, num_forwards)
            kinds.observe(StageTime(Stage.DRAFT, 1, *times, kind))
    assert kinds.choose(1) == EVERY
    assert kinds.per_token(1) == pytest.approx(0.8, rel=0.15)


@pytest.mark.parametrize("num_requests", [1, 16])
def test_forwards_behind_the_end_of_a_draft_do_not_count(num_requests: int):
    """Launching more than a draft takes makes no kind look worse, so that more are launched."""
    kinds, launched = BlockChoice((EVERY, LAST, ONE), DEFAULTS), 6
    for kind, used, ms in ((EVERY, 4, 2.3), (LAST, 6, 2.0), (ONE, 16, 1.6)):
        for _ in range(TRIALS):
            count = max(launched, used)
            times = (num_requests, 16.0, ms * count, count, kind, (), (16.0, used))
            kinds.observe(StageTime(Stage.DRAFT, *times))
    assert kinds.choose(num_requests) == EVERY
    assert kinds.costs[EVERY].tokens_per_forward == pytest.approx(4)
    assert kinds.per_token(num_requests) == pytest.approx(2.3 / 4)


def test_what_forwards_cost_is_known_before_what_they_bring():
    """Start-up times them; the first drafts count the tokens, at any load."""
    kinds = BlockChoice((EVERY, LAST), DEFAULTS)
    for kind, ms in ((EVERY, 3.0), (LAST, 1.0)):
        for num_requests in (1, 4, 16, 64):
            for _ in range(TRIALS):
                kinds.costs[kind].per_forward.add(num_requests, ms)
    assert kinds.per_token(4) == math.inf
    chosen = []
    for num_requests in (1, 16, 4, 64):
        chosen.append(kinds.choose(num_requests))
        tokens = {EVERY: 20.0, LAST: 12.0}[chosen[-1]]
        ms = {EVERY: 3.0, LAST: 1.0}[chosen[-1]]
        kinds.observe(StageTime(Stage.DRAFT, num_requests, tokens, 4 * ms, 4, chosen[-1]))
    assert chosen == [EVERY, LAST, LAST, LAST]


def test_other_than_the_candidates_is_neither_chosen_nor_measured():
    kinds = BlockChoice((EVERY, LAST, ONE), DEFAULTS)
    costs = {EVERY: (0.1, 0.0), LAST: (0.5, 0.0), ONE: (2.0, 0.0)}
    run(kinds, costs, 1, 3 * TRIALS + 1)
    assert kinds.current == EVERY
    assert {kinds.choose(1, [LAST, ONE]) for _ in range(16)} == {LAST}
    assert {kinds.choose(64, [ONE]) for _ in range(16)} == {ONE}
    assert kinds.choose(1, []) == EVERY


def test_a_draft_of_one_block_does_not_tell_what_blocks_bring():
    """It has nothing to confirm, and its length cuts it: 1.93 ms per token on an H200, not 0.4."""
    kinds = BlockChoice((EVERY, LAST), DEFAULTS)
    for _ in range(TRIALS):
        times = (1, 1.0, 1.9, 1, EVERY, (), (0.0, 0))
        kinds.observe(StageTime(Stage.DRAFT, *times))
    assert not kinds.costs[EVERY].knows(1)
    assert kinds.choose(1) == EVERY
    kinds.observe(StageTime(Stage.DRAFT, 1, 16.0, 7.6, 4, EVERY, (), (9.8, 2)))
    assert kinds.costs[EVERY].per_token(1) == pytest.approx(1.9 / 4.9)
