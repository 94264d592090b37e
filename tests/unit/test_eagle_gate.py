"""When the EAGLE-3 head runs for a request."""

from __future__ import annotations

import pytest

from sglang_parse.core.policy.controller import Controller
from sglang_parse.core.policy.eagle_gate import MAX_THRESHOLDS, MIN_ANSWERS, PROBE_EVERY, EagleGate
from sglang_parse.core.policy.stage_cost import Stage, StageTime

pytestmark = pytest.mark.unit

MS_PER_TOKEN = 1.0


def gate_after(num_decoded: int, *, count: int = MIN_ANSWERS, ms: float = 4.0) -> EagleGate:
    """Answers of 160 tokens, which the head processes in ``ms``."""
    gate = EagleGate()
    gate.observe_cost(160, ms)
    for _ in range(count):
        gate.observe_answer(0.5, 160, num_decoded)
    return gate


def test_the_head_runs_until_enough_is_known():
    assert EagleGate().pays(0.5, MS_PER_TOKEN)
    assert gate_after(0, count=MIN_ANSWERS - 1).pays(0.5, MS_PER_TOKEN)
    without_cost = EagleGate()
    for _ in range(MIN_ANSWERS):
        without_cost.observe_answer(0.5, 160, 0)
    assert without_cost.pays(0.5, MS_PER_TOKEN)


def test_the_head_runs_where_it_saves_more_than_it_costs():
    """It saves half of a decoded token's time."""
    assert not gate_after(0).pays(0.5, MS_PER_TOKEN)
    assert not gate_after(7).pays(0.5, MS_PER_TOKEN)
    assert gate_after(8).pays(0.5, MS_PER_TOKEN)
    # A token takes longer if fewer requests share the decode step.
    assert gate_after(1).pays(0.5, 8 * MS_PER_TOKEN)
    assert not gate_after(8, ms=5.0).pays(0.5, MS_PER_TOKEN)


def test_thresholds_are_independent():
    gate = gate_after(0)
    assert not gate.pays(0.5, MS_PER_TOKEN)
    assert gate.pays(0.9, MS_PER_TOKEN)


def test_hysteresis_near_break_even():
    """Each change invalidates cached prompts: both kinds are cached separately."""
    gate = gate_after(0)
    assert not gate.pays(0.5, MS_PER_TOKEN)
    for _ in range(200):
        gate.observe_answer(0.5, 160, 10)
    assert not gate.pays(0.5, MS_PER_TOKEN)
    for _ in range(200):
        gate.observe_answer(0.5, 160, 13)
    assert gate.pays(0.5, MS_PER_TOKEN)
    for _ in range(200):
        gate.observe_answer(0.5, 160, 10)
    assert gate.pays(0.5, MS_PER_TOKEN)


def test_bypassed_requests_probe_the_head_regularly():
    gate = gate_after(0)
    decided = [gate.pays(0.5, MS_PER_TOKEN) for _ in range(2 * PROBE_EVERY)]
    assert [i for i, runs in enumerate(decided) if runs] == [PROBE_EVERY - 1, 2 * PROBE_EVERY - 1]


def test_the_number_of_thresholds_is_bounded():
    gate = gate_after(0)
    for i in range(MAX_THRESHOLDS):
        gate.pays(1 / (3 + i), MS_PER_TOKEN)
    assert gate.pays(0.5, MS_PER_TOKEN)  # forgotten


def test_the_controller_uses_the_time_of_a_token_at_the_current_load():
    """Requests and tokens of a decode step share its time."""
    controller = Controller(eagle_gate=gate_after(4))
    assert controller.uses_eagle(0.5)  # the decode cost is unknown
    controller.observe([StageTime(Stage.DECODE, 1, 1, 6.0)])
    assert controller.uses_eagle(0.5)
    controller.observe_load(4)
    assert not controller.uses_eagle(0.5)


@pytest.mark.parametrize("mode", ["always", "never"])
def test_the_head_always_runs_if_drafting_is_fixed(mode: str):
    controller = Controller(mode=mode, eagle_gate=gate_after(0))
    controller.observe([StageTime(Stage.DECODE, 1, 1, 6.0)])
    assert controller.uses_eagle(0.5)
