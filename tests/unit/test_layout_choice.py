"""Which plan a burst takes: the cheapest at the load there is, each tried now and then."""

from collections import Counter

import pytest

from sglang_parse.core.block import DraftLayout
from sglang_parse.core.policy.layout_choice import (
    RETRY_EVERY,
    TRIALS,
    DraftLayoutChoice,
    layouts_for,
)
from sglang_parse.core.policy.stage_cost import Stage, StageTime

pytestmark = pytest.mark.unit


def burst(plan: DraftLayout, num_requests: int, ms_per_token: float) -> StageTime:
    return StageTime(
        Stage.DRAFT, num_requests, 16.0, 16 * ms_per_token, num_forwards=4, layout=plan
    )


def run(choice: DraftLayoutChoice, costs: dict, num_requests: int, bursts: int) -> Counter:
    """Bursts, by plan; ``costs``: plan -> ms a token for no request, and for each more."""
    used = Counter()
    for _ in range(bursts):
        plan = choice.choose(num_requests)
        used[plan] += 1
        base, slope = costs[plan]
        per_token = base + slope * num_requests
        choice.observe([burst(plan, num_requests, per_token)])
    return used


def test_plans():
    every, last, one = layouts_for(8, allow_one_token=True)
    assert [str(plan) for plan in (every, last, one)] == [
        "8 tokens a forward, masks behind every row",
        "8 tokens a forward, masks behind the last row",
        "one token a forward",
    ]
    assert [plan.rows_behind for plan in (every, last, one)] == [63, 14, 0]
    assert layouts_for(8, allow_one_token=False) == (every, last)
    assert layouts_for(1, allow_one_token=False) == (one,)


def test_the_cheapest_plan_is_taken_at_the_load_there_is():
    """Masks behind every row are cheap for one request, and dear for eight."""
    every, last, one = layouts_for(8, allow_one_token=True)
    costs = {every: (0.2, 0.2), last: (0.5, 0.05), one: (2.0, 0.0)}
    choice = DraftLayoutChoice((every, last, one))
    assert run(choice, costs, 1, 3 * TRIALS) == dict.fromkeys(costs, TRIALS)
    assert run(choice, costs, 1, RETRY_EVERY)[every] >= RETRY_EVERY - 2
    run(choice, costs, 8, 20)
    assert run(choice, costs, 8, RETRY_EVERY)[last] >= RETRY_EVERY - 2
    assert choice.cheapest(1) == every
    assert choice.costs[every].per_forward.at(1) == pytest.approx(4 * 0.4, rel=0.2)


def test_the_first_burst_of_a_plan_warms_up():
    every, last = layouts_for(4, allow_one_token=False)
    choice = DraftLayoutChoice((every, last))
    choice.observe([burst(every, 1, 999.0)])
    assert choice.costs[every].per_token.at(1) is None
    choice.observe([StageTime(Stage.DECODE, 1, 1, 3.0), burst(every, 1, 1.0)])
    assert choice.costs[every].per_token.at(1) == 1.0
    assert "behind every row: 1.00 ms a kept token, 4.00 ms a forward" in choice.describe(1)


def test_a_plan_is_not_left_for_noise():
    every, last = layouts_for(4, allow_one_token=False)
    choice = DraftLayoutChoice((every, last))
    run(choice, {every: (1.0, 0.0), last: (1.2, 0.0)}, 1, 8)
    assert choice.current == every
    assert run(choice, {every: (1.0, 0.0), last: (0.95, 0.0)}, 1, 50)[last] <= 1
    run(choice, {every: (1.0, 0.0), last: (0.3, 0.0)}, 1, 4 * RETRY_EVERY)
    assert choice.current == last
