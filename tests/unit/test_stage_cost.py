"""The time of a stage by its size."""

from __future__ import annotations

import pytest

from sglang_parse.core.pace import Pace
from sglang_parse.core.policy.constants import DEFAULTS
from sglang_parse.core.policy.costs import StageCost

pytestmark = pytest.mark.unit

WARM = 1 + DEFAULTS.cold_forwards
"""Forwards of a size until its time counts."""


def cost_of(*observed: tuple[float, float]) -> StageCost:
    cost = StageCost(DEFAULTS)
    for size, ms in observed:
        cost.add(size, ms)
    return cost


def test_interpolation_and_extrapolation():
    assert StageCost(DEFAULTS).at(3) is None
    one = cost_of(*[(4, 20.0)] * WARM)
    assert one.at(3) == one.at(4) == 20.0
    assert one.at(8) == pytest.approx(20 * (1 + 4 * DEFAULTS.row_cost))
    assert cost_of(*[(64, 20.0)] * WARM).at(128) == pytest.approx(25)  # a fourth of its proportion
    line = cost_of(*((n, 5 + 2 * n) for n in (1, 2, 4, 8) for _ in range(WARM)))
    assert line.at(3) == pytest.approx(11)
    assert line.at(8) == pytest.approx(21)


def test_an_unknown_size_is_hopefully_cheap():
    """What is believed to cost too much is never tried, so that nothing corrects it: between 1 and
    6 requests decode steps may differ much more than a pass of 22 rows from one of 6."""
    steep = cost_of(*((n, 100 + 40 * n) for n in (1, 6) for _ in range(WARM)))
    step = steep.at(6)
    assert steep.at(22) == pytest.approx(step * (1 + 16 * DEFAULTS.row_cost))
    flat = cost_of(*((n, 100 + n) for n in (1, 6) for _ in range(WARM)))
    assert flat.at(22) == pytest.approx(122)
    large = cost_of(*((n, 1.0 * n) for n in (64, 128) for _ in range(WARM)))
    assert large.at(256) == pytest.approx(256)  # in proportion at most


def test_all_sizes_follow_the_machines_pace():
    """One that was not seen since, too, and at a stage that shares it; one forward may be a
    mistake."""
    pace = Pace()
    step, passes = StageCost(DEFAULTS, pace), StageCost(DEFAULTS, pace)
    for _ in range(20):
        step.add(6, 60.0)
        passes.add(30, 90.0)
    passes.add(30, 180.0)
    assert step.at(6) == pytest.approx(60)
    for _ in range(8):
        passes.add(30, 180.0)
    assert step.at(6) == pytest.approx(120, rel=0.2)
    for _ in range(8):
        passes.add(30, 90.0)
    assert step.at(6) == pytest.approx(60, rel=0.2)


def test_a_size_that_was_not_seen_for_long_is_due_now_and_then():
    cost = cost_of(*[(6, 60.0)] * WARM)
    assert not cost.is_due(100)  # never seen
    found = []
    for _ in range(2 * DEFAULTS.retry_every):
        found.append(cost.is_due(6))
        cost.add(30, 90.0)
    assert sum(found) == 2
    assert found[DEFAULTS.retry_every - 1]
    cost.add(6, 80.0)  # counts as much as a first one
    assert cost.at(6) == pytest.approx(80)


def test_first_forwards_of_a_size_do_not_count():
    cost = cost_of((4, 900.0), (4, 20.0))
    assert cost.at(4) is None
    assert cost.add(4, 20.0) == cost.at(4) == 20.0


def test_what_a_forward_is_believed_to_take():
    """One that compiles must not count against drafting."""
    cost = cost_of(*[(4, 20.0)] * WARM)
    assert cost.add(64, 300.0) is None  # a new size, and far above the others
    assert cost.add(64, 50.0) == 50.0
    assert cost.add(4, 300.0) == DEFAULTS.max_outlier * 20.0


def test_noise_never_makes_cost_fall_with_size():
    falling = cost_of(*[(1, 10.0), (2, 8.0)] * WARM)
    assert falling.at(8) == falling.at(1)


def test_old_observations_decay_and_outliers_are_capped():
    cost = cost_of(*[(1, 10.0)] * 50)
    cost.add(1, 10_000.0)
    assert cost.at(1) <= 12
    for _ in range(100):
        cost.add(1, 20.0)
    assert cost.at(1) == pytest.approx(20, rel=0.02)


def test_much_faster_forwards_correct_the_mean():
    """A server's first calls compile, or share the machine with other servers that start."""
    cost = cost_of(*[(32, 900.0)] * 5)
    for _ in range(12):
        cost.add(32, 30.0)
    assert cost.at(32) == pytest.approx(30, rel=0.2)


def test_one_low_time_changes_little():
    cost = cost_of(*[(8, 10.0)] * 20)
    cost.add(8, 0.4)
    assert cost.at(8) >= 9
    cost.add(8, 10.0)
    assert cost.at(8) >= 9
    for _ in range(2):
        cost.add(8, 0.4)
    assert cost.at(8) <= 5  # a second one agrees


def test_a_size_that_is_not_seen_for_long_is_unknown():
    cost = cost_of(*[(4, 20.0)] * WARM)
    assert cost.knows(8)
    assert not cost.knows(9)
    for _ in range(DEFAULTS.max_age):
        cost.add(64, 40.0)
    assert not cost.knows(4)
    assert cost.at(4) == 40.0
