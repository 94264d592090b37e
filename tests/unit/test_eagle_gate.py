"""Whether an EAGLE-3 head reads along."""

from __future__ import annotations

import pytest

from sglang_parse.core.policy.controller import Controller
from sglang_parse.core.policy.eagle_gate import AGAIN, KNOWN, MAX_THRESHOLDS, EagleGate
from sglang_parse.core.policy.stage_cost import Stage, StageTime

pytestmark = pytest.mark.unit

MS_PER_TOKEN = 1.0


def reading(stepped: int, *, count: int = KNOWN, ms: float = 4.0) -> EagleGate:
    """Answers of 160 tokens, which the head reads in ``ms``."""
    found = EagleGate()
    found.observe_cost(160, ms)
    for _ in range(count):
        found.observe_answer(0.5, 160, stepped)
    return found


def test_all_are_read_until_something_is_known():
    assert EagleGate().pays(0.5, MS_PER_TOKEN)
    assert reading(0, count=KNOWN - 1).pays(0.5, MS_PER_TOKEN)
    unpriced = EagleGate()
    for _ in range(KNOWN):
        unpriced.observe_answer(0.5, 160, 0)
    assert unpriced.pays(0.5, MS_PER_TOKEN)


def test_reading_costs_no_more_than_its_steps_save():
    """Half of a stepped token's time is saved."""
    assert not reading(0).pays(0.5, MS_PER_TOKEN)
    assert not reading(7).pays(0.5, MS_PER_TOKEN)
    assert reading(8).pays(0.5, MS_PER_TOKEN)
    # The same answers, where a step is dearer: fewer requests share it.
    assert reading(1).pays(0.5, 8 * MS_PER_TOKEN)
    assert not reading(8, ms=5.0).pays(0.5, MS_PER_TOKEN)


def test_thresholds_are_apart():
    found = reading(0)
    assert not found.pays(0.5, MS_PER_TOKEN)
    assert found.pays(0.9, MS_PER_TOKEN)


def test_about_even_it_stays_as_it_was():
    """Each change leaves prompts in a part of the cache where nobody finds them."""
    found = reading(0)
    assert not found.pays(0.5, MS_PER_TOKEN)
    for _ in range(200):
        found.observe_answer(0.5, 160, 10)
    assert not found.pays(0.5, MS_PER_TOKEN)
    for _ in range(200):
        found.observe_answer(0.5, 160, 13)
    assert found.pays(0.5, MS_PER_TOKEN)
    for _ in range(200):
        found.observe_answer(0.5, 160, 10)
    assert found.pays(0.5, MS_PER_TOKEN)


def test_now_and_then_one_is_read_all_the_same():
    found = reading(0)
    decided = [found.pays(0.5, MS_PER_TOKEN) for _ in range(2 * AGAIN)]
    assert [i for i, is_read in enumerate(decided) if is_read] == [AGAIN - 1, 2 * AGAIN - 1]


def test_any_number_of_thresholds():
    found = reading(0)
    for i in range(MAX_THRESHOLDS):
        found.pays(1 / (3 + i), MS_PER_TOKEN)
    assert found.pays(0.5, MS_PER_TOKEN)  # forgotten


def test_the_controller_asks_at_the_load_there_is():
    """A step's time is shared by those in it, and by the tokens it brings."""
    controller = Controller(eagle_gate=reading(4))
    assert controller.uses_eagle(0.5)  # no price of a step yet
    controller.observe([StageTime(Stage.DECODE, 1, 1, 6.0)])
    assert controller.uses_eagle(0.5)
    controller.observe_load(4)
    assert not controller.uses_eagle(0.5)


@pytest.mark.parametrize("mode", ["always", "never"])
def test_where_drafting_is_fixed_all_are_read(mode: str):
    controller = Controller(mode=mode, eagle_gate=reading(0))
    controller.observe([StageTime(Stage.DECODE, 1, 1, 6.0)])
    assert controller.uses_eagle(0.5)
