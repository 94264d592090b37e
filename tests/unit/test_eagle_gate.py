"""When the EAGLE-3 head runs for a request."""

from __future__ import annotations

import pytest

from sglang_parse.core.policy.constants import DEFAULTS
from sglang_parse.core.policy.controller import Controller
from sglang_parse.core.stage import Stage, StageTime

pytestmark = pytest.mark.unit

KEY, OTHER = (0.5, ""), (0.9, "")


def gate_after(
    num_decoded: int,
    *,
    count: int = DEFAULTS.window,
    ms: float = 4.0,
    step_ms: float = 1.0,
    mode: str = "auto",
) -> Controller:
    """Answers of 160 tokens, which the head processes in ``ms``, and timed decode steps."""
    controller = Controller(mode=mode)
    if step_ms:
        for _ in range(1 + DEFAULTS.cold_forwards):
            controller.observe([StageTime(Stage.DECODE, 1, 1, step_ms)], [(None, 1)])
    if ms:
        controller.observe_prefill(0.0, 160, ms)
    for _ in range(count):
        controller.observe_answer(KEY, 160, num_decoded)
    return controller


@pytest.mark.parametrize(
    "unknown", [{"count": DEFAULTS.window - 1}, {"ms": 0.0}, {"step_ms": 0.0}], ids=str
)
def test_the_head_runs_until_enough_is_known(unknown: dict):
    assert gate_after(0, **unknown).uses_eagle(KEY)


def test_the_head_runs_where_it_saves_more_than_it_costs():
    """It saves half of a decoded token's time."""
    assert not gate_after(0).uses_eagle(KEY)
    assert not gate_after(7).uses_eagle(KEY)
    assert gate_after(8).uses_eagle(KEY)
    assert not gate_after(8, ms=5.0).uses_eagle(KEY)


def test_what_it_drafts_pays_for_itself():
    """A load of 16 behind one of 1, whose short prompts took it long: as measured on the demo
    target's MTP layer, which a quarter of the requests did without."""
    controller = gate_after(100, ms=48.0, step_ms=4.0)
    controller.num_running = 4
    assert controller.uses_eagle(KEY)


def test_a_short_prefill_counts_little():
    controller = gate_after(8)
    for _ in range(4):
        controller.observe_prefill(0.0, 5, 2.0)
        controller.observe_prefill(0.0, 800, 16.0)
    assert controller.uses_eagle(KEY)


def test_requests_and_tokens_of_a_step_share_its_time():
    controller = gate_after(4, step_ms=6.0)
    assert controller.uses_eagle(KEY)
    controller.num_running = 4
    assert not controller.uses_eagle(KEY)


def test_keys_are_independent():
    controller = gate_after(0)
    assert not controller.uses_eagle(KEY)
    assert controller.uses_eagle(OTHER)


def test_hysteresis_near_break_even():
    """Each change invalidates cached prompts: both kinds are cached separately."""
    controller = gate_after(0)
    decided = [controller.uses_eagle(KEY)]
    for num_decoded in (8, 10, 8):
        for _ in range(300):
            controller.observe_answer(KEY, 160, num_decoded)
        decided.append(controller.uses_eagle(KEY))
    assert decided == [False, False, True, True]


def test_bypassed_requests_probe_the_head_regularly():
    controller, every = gate_after(0), DEFAULTS.retry_every
    decided = [controller.uses_eagle(KEY) for _ in range(2 * every)]
    assert [i for i, runs in enumerate(decided) if runs] == [every - 1, 2 * every - 1]


@pytest.mark.parametrize("mode", ["always", "never"])
def test_the_head_always_runs_if_drafting_is_fixed(mode: str):
    assert gate_after(0, mode=mode).uses_eagle(KEY)
