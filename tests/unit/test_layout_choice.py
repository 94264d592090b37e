"""The draft layout with the lowest cost at the current load."""

from collections import Counter

import pytest

from sglang_parse.core.block import DraftLayout
from sglang_parse.core.policy.layout_choice import (
    MIN_FORWARDS,
    MIN_PROBES,
    RETRY_EVERY,
    DraftLayoutChoice,
    layouts_for,
)
from sglang_parse.core.policy.stage_cost import Stage, StageTime

pytestmark = pytest.mark.unit


def draft_time(layout: DraftLayout, num_requests: int, ms_per_token: float) -> StageTime:
    return StageTime(
        Stage.DRAFT, num_requests, 16.0, 16 * ms_per_token, num_forwards=4, layout=layout
    )


def run(choice: DraftLayoutChoice, costs: dict, num_requests: int, num_chunks: int) -> Counter:
    """Draft chunks by layout; ``costs``: layout -> (ms per token, the same per request)."""
    used = Counter()
    for _ in range(num_chunks):
        layout = choice.choose(num_requests)
        used[layout] += 1
        base, slope = costs[layout]
        per_token = base + slope * num_requests
        choice.observe([draft_time(layout, num_requests, per_token)])
    return used


def test_candidate_layouts():
    every, last, one = layouts_for(8, allow_one_token=True)
    assert [str(layout) for layout in (every, last, one)] == [
        "8 tokens per forward, masks after every row",
        "8 tokens per forward, masks after the last row",
        "one token per forward",
    ]
    assert [layout.lookahead_rows for layout in (every, last, one)] == [63, 14, 0]
    assert layouts_for(8, allow_one_token=False) == (every, last)
    assert layouts_for(1, allow_one_token=False) == (one,)


def test_the_cheapest_layout_at_the_current_load_is_used():
    """Masks after every row are cheap for one request and expensive for eight."""
    every, last, one = layouts_for(8, allow_one_token=True)
    costs = {every: (0.2, 0.2), last: (0.5, 0.05), one: (2.0, 0.0)}
    choice = DraftLayoutChoice((every, last, one))
    probes = 1 + MIN_FORWARDS // 4
    assert run(choice, costs, 1, 3 * probes) == dict.fromkeys(costs, probes)
    assert run(choice, costs, 1, RETRY_EVERY)[every] >= RETRY_EVERY - 2
    run(choice, costs, 8, 20)
    assert run(choice, costs, 8, RETRY_EVERY)[last] >= RETRY_EVERY - 2
    assert choice.cheapest(1) == every
    assert choice.costs[every].per_forward.at(1) == pytest.approx(4 * 0.4)


def test_the_first_chunk_of_a_layout_is_not_counted():
    every, last = layouts_for(4, allow_one_token=False)
    choice = DraftLayoutChoice((every, last))
    choice.observe([draft_time(every, 1, 999.0)])
    assert choice.costs[every].per_token(1) is None
    choice.observe([StageTime(Stage.DECODE, 1, 1, 3.0), draft_time(every, 1, 1.0)])
    assert choice.costs[every].per_token(1) == 1.0
    assert "after every row: 1.00 ms per accepted token, 4.00 ms per forward" in choice.describe(1)


def test_noise_does_not_change_the_layout():
    every, last = layouts_for(4, allow_one_token=False)
    choice = DraftLayoutChoice((every, last))
    run(choice, {every: (1.0, 0.0), last: (1.2, 0.0)}, 1, 12)
    assert choice.current == every
    assert run(choice, {every: (1.0, 0.0), last: (0.95, 0.0)}, 1, 50)[last] <= 1
    run(choice, {every: (1.0, 0.0), last: (0.3, 0.0)}, 1, 4 * RETRY_EVERY)
    assert choice.current == last


def test_the_last_tokens_of_drafts_say_little():
    """A forward that may accept eight tokens costs as much where a draft ends after one."""
    every, last = layouts_for(8, allow_one_token=False)
    choice = DraftLayoutChoice((every, last))
    for layout, lengths in ((every, (9, 1, 1, 1, 80)), (last, (9, 40, 40))):
        for num_tokens in lengths:
            num_forwards = -(-num_tokens // (5 if layout is every else 3))
            times = (num_tokens, (4.0 if layout is every else 3.0) * num_forwards, num_forwards)
            choice.observe([StageTime(Stage.DRAFT, 1, *times, layout)])
    assert choice.choose(1) == every
    assert choice.costs[every].per_token(1) == pytest.approx(0.8, rel=0.15)


def test_each_layout_is_measured_at_each_load():
    """A server that knew eight requests only took masks after every row for dear at one, too."""
    every, last, one = layouts_for(8, allow_one_token=True)
    costs = {every: (0.0, 0.5), last: (1.0, 0.05), one: (2.0, 0.1)}
    choice = DraftLayoutChoice((every, last, one))
    run(choice, costs, 8, 50)
    assert choice.current == last
    assert run(choice, costs, 1, 3 * MIN_PROBES) == dict.fromkeys(costs, MIN_PROBES)
    assert choice.choose(1) == every
