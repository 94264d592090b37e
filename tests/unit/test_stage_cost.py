"""The time of a stage by its size."""

from __future__ import annotations

import pytest

from sglang_parse.core.policy.stage_cost import StageCost

pytestmark = pytest.mark.unit


def cost_of(*observed: tuple[float, float]) -> StageCost:
    cost = StageCost()
    for size, ms in observed:
        cost.add(size, ms)
    return cost


def test_interpolation_and_extrapolation():
    assert StageCost().at(3) is None
    assert cost_of((4, 20.0)).at(4) == cost_of((4, 20.0)).at(8) == 20.0
    line = cost_of(*((n, 5 + 2 * n) for n in (1, 2, 4, 8)))
    assert line.at(3) == pytest.approx(11)
    assert line.at(16) == pytest.approx(37)


def test_noise_never_makes_cost_fall_with_size():
    """Nor makes it negative."""
    falling = cost_of((1, 10.0), (2, 8.0), (1, 10.0), (2, 8.0))
    assert falling.at(8) == falling.at(1)
    steep = cost_of((4, 4.0), (8, 12.0), (4, 4.0), (8, 12.0))
    assert 0 <= steep.at(0) <= 4


def test_old_observations_decay_and_outliers_are_capped():
    cost = cost_of(*[(1, 10.0)] * 50)
    cost.add(1, 10_000.0)
    assert cost.at(1) <= 12
    for _ in range(100):
        cost.add(1, 20.0)
    assert cost.at(1) == pytest.approx(20, rel=0.02)


def test_a_much_faster_call_resets_the_mean():
    """A server's first calls compile, or share the machine with other servers that start."""
    cost = cost_of(*[(32, 900.0)] * 3, *[(64, 1000.0)] * 3)
    cost.add(64, 30.0)
    assert cost.at(64) == pytest.approx(30)
    assert cost.at(32) <= 30  # less work takes no longer
    cost.add(64, 40.0)
    assert cost.at(64) == pytest.approx(35)
