"""The controller's decisions, with costs and acceptance far from any tie."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.policy.acceptance import VerifyOutcome
from sglang_parse.core.policy.controller import (
    CLEAR_FACTOR,
    COLD_START_TOKENS,
    FORCED_TOKENS,
    INITIAL_BOOST,
    MAX_DECODE_AGE,
    MIN_DECODE_AGE,
    PROBE_TIMEOUT,
    REPROBE_FRACTION,
    SEARCH_EVERY,
    SEARCH_MS,
    WARMUP_ROUNDS,
    Controller,
)
from sglang_parse.core.policy.limits import Limits
from sglang_parse.core.policy.planner import Planner
from sglang_parse.core.policy.stage_cost import Stage, StageTime
from sglang_parse.core.policy.threshold_stats import COLD_START_PROBES, MAX_ENTRIES, stats_key

pytestmark = pytest.mark.unit

HALF, LOW = 0.5, 0.25
GOOD = VerifyOutcome(
    128, num_verified=128, num_segments=10, accepted_len=128, reject_end=None, is_finished=False
)
BAD = VerifyOutcome(
    COLD_START_TOKENS,
    num_verified=COLD_START_TOKENS,
    num_segments=COLD_START_TOKENS,
    accepted_len=0,
    reject_end=1,
    is_finished=False,
)
STEP_MS = 8.0
FREE = Limits()


def with_costs(limits: Limits = FREE, *, draft_step: float = 1.0, per_row: float = 0.02):
    """A controller that has observed all stages."""
    controller = Controller(limits)
    for size in (1, 2, 4, 8, 16):
        controller.observe(
            [
                StageTime(Stage.DRAFT, size, 16, 16 * draft_step),
                StageTime(Stage.VERIFY, 200 * size, 0, STEP_MS + per_row * 200 * size),
                StageTime(Stage.DECODE, size, size, STEP_MS),
            ]
        )
    return controller


def observe(
    controller: Controller, outcome: VerifyOutcome, threshold: float = HALF, rounds: int = 10
):
    for _ in range(rounds):
        controller.observe_round(threshold, outcome)


@pytest.mark.parametrize(("mode", "drafts"), [("always", True), ("never", False)])
def test_fixed_modes(mode: str, drafts: bool):
    limits = Limits.of(ParseConfig(judge="question", drafting=mode, draft_tokens=64), 20)
    controller = Controller(limits, mode)
    observe(controller, BAD if drafts else GOOD)
    for threshold in (HALF, 1.5):
        plan = controller.plan(threshold)
        assert (plan is not None) is drafts
        if plan:
            assert (plan.draft_tokens, plan.max_prefixes, plan.draft_chunk) == (64, 16, 16)


@pytest.mark.parametrize("mode", ["auto", "never"])
def test_a_request_may_ask_for_drafts_that_do_not_pay(mode: str):
    controller = with_costs(
        Limits.of(ParseConfig(judge="question", drafting=mode, draft_tokens=64), 20)
    )
    controller.mode = mode
    observe(controller, BAD)
    for threshold in (HALF, 1.5):
        assert controller.plan(threshold) is None
        plan = controller.plan(threshold, always=True)
        assert plan is not None
        assert (plan.draft_tokens, plan.max_prefixes, plan.speedup) == (64, 16, None)


def test_forced_drafts_are_short():
    controller = with_costs()
    good = controller.plan(HALF, always=True)
    assert good == with_costs().plan(HALF)
    plan = controller.plan(1.5, always=True)
    assert plan is not None
    assert plan.draft_tokens == FORCED_TOKENS


def test_a_threshold_above_one_never_drafts():
    controller = with_costs()
    assert controller.plan(1.5) is None
    assert controller.no_draft_reason == "a threshold above 1 accepts no draft"
    assert with_costs().plan(1.0) is not None


def test_an_unknown_threshold_sends_one_short_probe_at_a_time():
    controller = with_costs()
    probe = controller.plan(HALF)
    assert probe is not None
    assert (probe.draft_tokens, probe.speedup) == (COLD_START_TOKENS, None)
    asked = [controller.plan(HALF) for _ in range(PROBE_TIMEOUT)]
    assert asked == [None] * PROBE_TIMEOUT
    assert controller.plan(HALF) is not None  # the request may have been aborted


def test_bad_probes_suspend_drafting():
    controller = with_costs(draft_step=2.0)
    for _ in range(COLD_START_PROBES):
        assert controller.plan(HALF) is not None
        controller.observe_round(HALF, BAD)
    assert controller.plan(HALF) is None
    assert controller.speedup is not None
    assert controller.speedup < 1
    reason = f"drafting suspended: expected speedup {controller.speedup:.2f}, below 1.05"
    assert controller.no_draft_reason == reason


def test_draft_length_follows_acceptance():
    good, mediocre = with_costs(), with_costs()
    observe(good, GOOD)
    rejected = VerifyOutcome(
        128, num_verified=128, num_segments=10, accepted_len=26, reject_end=38, is_finished=False
    )
    observe(mediocre, rejected)
    assert good.plan(HALF).draft_tokens == 128
    assert mediocre.plan(HALF).draft_tokens < 128


def test_matched_tokens_make_rejected_drafts_pay():
    controller, matching = with_costs(), BAD._replace(num_matched=COLD_START_TOKENS - 2)
    observe(controller, BAD, LOW, rounds=30)
    observe(controller, matching, HALF, rounds=30)
    assert controller.plan(LOW) is None
    assert controller.plan(HALF) is not None


def test_expensive_rows_reduce_the_number_of_prefixes():
    """Every prefix costs its question's rows."""
    limits = Limits(question_rows=40)
    cheap, expensive = with_costs(limits, per_row=0.001), with_costs(limits, per_row=2.0)
    for controller in (cheap, expensive):
        observe(controller, GOOD, rounds=5)
        observe(controller, rejected_after(64, 77), rounds=1)
        observe(controller, GOOD, rounds=10)
    assert expensive.plan(HALF).max_prefixes < cheap.plan(HALF).max_prefixes


def rejected_after(accepted_len: int, reject_end: int) -> VerifyOutcome:
    return GOOD._replace(accepted_len=accepted_len, reject_end=reject_end)


def test_decisions_depend_on_load():
    """Draft cost grows with the number of requests, decode cost does not."""
    controller = Controller()
    for count in (1, 2, 4, 8, 16):
        controller.observe(
            [
                StageTime(Stage.DRAFT, count, 16, 32.0 * count),
                StageTime(Stage.DECODE, count, count, 8.0),
            ]
        )
        controller.observe([StageTime(Stage.VERIFY, 200 * count, 0, 60.0 * count)])
    observe(controller, GOOD)
    answers = []
    for count in (1, 16, 1):
        controller.observe_load(count)
        answers.append(controller.plan(HALF) is not None)
    assert answers == [True, False, True]


def test_more_tokens_per_decode_step_make_drafting_pay_less():
    controller = with_costs(draft_step=3.0)
    observe(controller, GOOD)
    assert controller.plan(HALF) is not None
    for _ in range(100):
        controller.observe([StageTime(Stage.DECODE, 1, 4, STEP_MS)])
    assert [controller.plan(HALF) for _ in range(SEARCH_EVERY)][-1] is None


def test_plans_are_not_searched_again_without_new_observations(
    monkeypatch: pytest.MonkeyPatch,
):
    """A search takes milliseconds, and suspended requests query at every token."""
    controller, searches = with_costs(), []
    search = Planner.best
    monkeypatch.setattr(Planner, "best", lambda *call: searches.append(call) or search(*call))
    controller.observe_load(16)
    observe(controller, BAD, rounds=COLD_START_PROBES)
    for _ in range(4 * 16):
        controller.plan(HALF)
    assert 1 <= len(searches) <= 5


def test_thresholds_have_separate_statistics():
    controller = with_costs()
    observe(controller, BAD, HALF, rounds=30)
    observe(controller, GOOD, LOW, rounds=30)
    assert controller.plan(HALF) is None
    assert controller.plan(LOW) is not None


def test_requests_with_failed_drafts_have_separate_statistics():
    """Some prompts are too hard for the draft model; the others still draft."""
    controller = with_costs(draft_step=2.0)
    observe(controller, GOOD, rounds=30)
    for _ in range(10):
        controller.observe_round(HALF, BAD, num_failed=1)
        controller.observe_round(HALF, BAD, num_failed=7)
    assert controller.plan(HALF) is not None
    assert controller.plan(HALF, num_failed=1) is None
    assert controller.plan(HALF, num_failed=3) is None


def test_decoding_requests_that_wait_for_drafts_count():
    """A plan may pay for eight drafting requests but not for one among seven decoding ones."""
    controller = with_costs(draft_step=1.5)
    observe(controller, rejected_after(40, 52), rounds=30)
    controller.observe_load(8)
    assert controller.plan(HALF) is not None
    controller.observe_load(8, [None] * 7)
    for _ in range(math.ceil(SEARCH_MS / STEP_MS) + SEARCH_EVERY):
        controller.observe([StageTime(Stage.DECODE, 8, 8, STEP_MS)])
        last = controller.plan(HALF)
    assert last is None


def test_plans_are_not_searched_at_every_query(monkeypatch: pytest.MonkeyPatch):
    """A search takes milliseconds, and 16 suspended requests query at every token."""
    controller, searches = with_costs(draft_step=4.0), []
    controller.observe_load(16, [stats_key(HALF)] * 16)
    observe(controller, BAD, rounds=WARMUP_ROUNDS)
    search = Planner.best
    monkeypatch.setattr(Planner, "best", lambda *args: searches.append(1) or search(*args))
    for _ in range(100):
        controller.observe([StageTime(Stage.DECODE, 16, 16, STEP_MS)])
        for _ in range(16):
            controller.plan(HALF)
    assert 1 <= len(searches) <= 1 + 100 * STEP_MS / SEARCH_MS


def test_a_new_threshold_starts_from_its_neighbours():
    """A stricter threshold accepts no more than a laxer one."""
    controller = with_costs()
    observe(controller, BAD, LOW, rounds=30)
    controller.observe_round(HALF, BAD)
    alone = with_costs()
    alone.observe_round(HALF, BAD)
    controller.plan(HALF)
    informed = controller.speedup
    alone.plan(HALF)
    assert informed < alone.speedup


def test_the_number_of_thresholds_is_bounded():
    controller = with_costs(draft_step=2.0)
    observe(controller, BAD, HALF)
    for i in range(MAX_ENTRIES - 1):
        controller.plan(i / 1000)
        assert controller.plan(HALF) is None  # recently used, so retained
    for i in range(MAX_ENTRIES):
        controller.plan(0.6 + i / 1000)
    assert controller.plan(HALF) is not None  # evicted


def test_reprobes_come_one_at_a_time_and_lose_a_bounded_fraction():
    controller = with_costs(draft_step=4.0)
    controller.observe_load(4, [stats_key(HALF)] * 4)
    observe(controller, BAD, rounds=30)
    steps = probes = 0
    while probes < 12 and steps < 20_000:
        steps += 1
        controller.observe([StageTime(Stage.DECODE, 4, 4, STEP_MS)])
        asked = [controller.plan(HALF) for _ in range(4)]
        assert sum(plan is not None for plan in asked) <= 1
        for plan in filter(None, asked):
            assert plan.draft_tokens == COLD_START_TOKENS
            probes += 1
            controller.observe_round(HALF, BAD)
    assert probes == 12
    probe_ms = COLD_START_TOKENS * 4.0 + STEP_MS  # its tokens save less than a decode step
    num_early = math.log2(INITIAL_BOOST)
    assert (probes - num_early) * probe_ms <= 1.1 * REPROBE_FRACTION * steps * STEP_MS + probe_ms


def test_the_first_reprobes_come_early():
    """Costs of a server's first seconds may be those of a busy machine."""
    controller = with_costs()
    controller.observe_load(1, [stats_key(HALF)])
    slow = StageTime(Stage.VERIFY, 200, 0, 50 * STEP_MS)
    for _ in range(COLD_START_PROBES):
        controller.observe([slow, StageTime(Stage.DRAFT, 1, 16, 50 * STEP_MS)])
        controller.observe_round(HALF, GOOD)
    waited = 0
    while controller.plan(HALF) is None:
        controller.observe([StageTime(Stage.DECODE, 1, 1, STEP_MS)])
        waited += 1
        assert waited < 1000
    controller.observe([replace(slow, ms=STEP_MS), StageTime(Stage.DRAFT, 1, 16, 16.0)])
    controller.observe_round(HALF, GOOD)
    for _ in range(SEARCH_EVERY):
        controller.observe([StageTime(Stage.DECODE, 1, 1, STEP_MS)])
        last = controller.plan(HALF)
    assert last is not None


def test_suspended_statistics_share_one_reprobe_budget():
    """Requests with different failure counts re-probe together as rarely as alike ones."""

    def num_probes(kinds: int) -> int:
        controller, count = with_costs(draft_step=4.0), 0
        controller.observe_load(4, [stats_key(HALF, i % kinds) for i in range(4)])
        observe(controller, BAD, rounds=30)
        for _ in range(12_000):
            controller.observe([StageTime(Stage.DECODE, 4, 4, STEP_MS)])
            for i in range(4):
                if controller.plan(HALF, i % kinds):
                    count += 1
                    controller.observe_round(HALF, BAD, i % kinds)
        return count

    assert 4 <= num_probes(4) <= 1.2 * num_probes(1)


def test_an_adapter_has_statistics_of_its_own():
    """Its rejected drafts do not suspend those of the base model, nor the other way round."""
    controller = with_costs()
    observe(controller, GOOD, rounds=30)
    for _ in range(30):
        controller.observe_round(HALF, BAD, adapter="adapter")
    assert controller.plan(HALF) is not None
    assert controller.plan(HALF, adapter="adapter") is None
    assert controller.plan(HALF, adapter="another") is not None  # a cold-start probe


def test_drafting_resumes_after_good_reprobes():
    controller = with_costs()
    controller.observe_load(1, [stats_key(HALF)])
    observe(controller, BAD, rounds=30)
    probes = 0
    for _ in range(20_000):
        controller.observe([StageTime(Stage.DECODE, 1, 1, STEP_MS)])
        if controller.plan(HALF):
            probes += 1
            controller.observe_round(
                HALF,
                GOOD._replace(
                    num_drafted=COLD_START_TOKENS,
                    num_verified=COLD_START_TOKENS,
                    accepted_len=COLD_START_TOKENS,
                    num_segments=1,
                ),
            )
        if probes == 60:
            break
    assert all(controller.plan(HALF) for _ in range(5))


@pytest.mark.parametrize(("draft_ms", "factor"), [(112.0, 1), (16.0, CLEAR_FACTOR)])
def test_the_decode_cost_is_measured_again(draft_ms: float, factor: int):
    """Less often where drafting clearly pays."""
    controller = Controller()
    observe(controller, GOOD)
    assert controller.plan(HALF) is None  # the decode cost is unknown
    assert controller.no_draft_reason.startswith("plain decoding is being timed")
    controller.observe(
        [StageTime(Stage.DECODE, 1, 1, 8.0), StageTime(Stage.DRAFT, 1, 16, draft_ms)]
    )
    every = factor * MIN_DECODE_AGE  # a server's first decode steps may be slow
    while every < factor * MAX_DECODE_AGE:
        asked = [controller.plan(HALF) is not None for _ in range(every + 1)]
        assert asked == [True] * every + [False]
        controller.observe([StageTime(Stage.DECODE, 1, 1, 8.0)])
        every *= 2
    asked = [controller.plan(HALF) is not None for _ in range(every + 1)]
    assert asked == [True] * every + [False]


# -- settings --------------------------------------------------


def test_given_settings_are_fixed():
    config = ParseConfig(judge="question", draft_tokens=48, draft_chunk=8)
    limits = Limits.of(config, 20)
    assert limits.fixed == {"draft_tokens", "draft_chunk"}
    controller = with_costs(limits)
    assert controller.plan(HALF).draft_tokens == 48  # the probe, too
    observe(controller, rejected_after(4, 12)._replace(num_drafted=48, num_verified=48))
    for _ in range(10):
        if plan := controller.plan(HALF):
            assert (plan.draft_tokens, plan.draft_chunk) == (48, 8)
    assert Limits.of(ParseConfig(judge="question"), 20).fixed == frozenset()
    assert Limits.of(ParseConfig(judge="likelihood"), 0).fixed == {"max_prefixes"}


def test_simulated_acceptance_fixes_the_draft_length():
    """Its ratio does not depend on the length, unlike a draft model's."""
    limits = Limits.of(ParseConfig(), 20, fixed_ratio=True)
    assert limits.fixed == {"draft_tokens", "max_prefixes"}
    assert (
        with_costs(limits).plan(HALF).draft_tokens == ParseConfig().draft_tokens
    )  # the probe, too


def test_deterministic_inference_ignores_wall_times():
    limits = Limits.of(ParseConfig(), 20, is_timed=False)
    assert limits.fixed == {"draft_tokens", "max_prefixes", "draft_chunk"}
    assert (limits.max_itl_ratio, limits.max_draft_latency_ms, limits.draft_chunk) == (0, 0, 16)


def test_draft_latency_is_bounded():
    free, bound = with_costs(), with_costs(Limits(max_draft_latency_ms=60.0))
    for controller in (free, bound):
        observe(controller, GOOD)
    assert free.plan(HALF).draft_tokens == 128  # 128 ms of drafting
    assert bound.plan(HALF).draft_tokens <= 52
    impossible = with_costs(Limits(max_draft_latency_ms=1.0))
    observe(impossible, GOOD)
    assert impossible.plan(HALF).draft_tokens <= 24


# -- iterations -------------------------------------------------------------------


def test_no_limit_if_no_request_decodes():
    controller = with_costs(Limits(max_itl_ratio=2.5))
    assert controller.limit_iteration(3, [200, 200], 0) == (16, 2)


def test_ready_drafts_wait_for_others_that_may_join_if_no_request_decodes():
    controller = with_costs(Limits(max_itl_ratio=2.5))
    assert controller.limit_iteration(3, [200, 200], 0, may_join=True) == (16, 0)
    assert controller.limit_iteration(0, [200, 200], 0, may_join=True) == (
        16,
        2,
    )  # no request drafts
    assert controller.limit_iteration(3, [200], 1, may_join=True)[1] == 1
    assert replace(controller, mode="always").limit_iteration(3, [200], 0, may_join=True)[1] == 1


def test_itl_of_decoding_requests_is_bounded():
    controller = with_costs(Limits(max_itl_ratio=2.5, question_rows=10))
    controller.observe_load(4)
    observe(controller, GOOD)
    controller.plan(HALF)
    chunk, num_verified = controller.limit_iteration(2, [], 2)
    assert chunk * 1.0 + STEP_MS <= 2.5 * STEP_MS + 1
    assert num_verified == 0
    chunk, num_verified = controller.limit_iteration(0, [600, 600, 600], 1)
    assert num_verified == 1  # each verify pass takes 20 ms
    assert controller.limit_iteration(2, [5000], 1) == (1, 1)  # at least one of each


def test_a_fixed_chunk_is_not_shortened():
    limits = Limits(max_itl_ratio=2.5, draft_chunk=64, fixed=frozenset({"draft_chunk"}))
    controller = with_costs(limits)
    assert controller.limit_iteration(2, [], 2) == (64, 0)


def test_no_limit_without_a_bound():
    controller = replace(with_costs(), num_running=4)
    observe(controller, GOOD)
    controller.plan(HALF)
    assert controller.limit_iteration(2, [600] * 3, 1) == (controller.draft_chunk, 3)


def test_fairness_debt_bounds_the_mean_iteration_of_plain_requests():
    """Single iterations may exceed the bound."""
    controller = with_costs(Limits(max_slowdown=1.5))
    controller.observe_load(4)
    waited, total, count = 0, 0.0, 0
    for _ in range(200):
        chunk, num_verified = controller.limit_iteration(2, [600], 1, num_plain=1)
        assert (chunk, num_verified) in {(controller.draft_chunk, 1), (0, 0)}
        spent = 60.0 if num_verified else 0.0
        waited += not num_verified
        drafts = [StageTime(Stage.DRAFT, 2, chunk, spent)] if chunk else []
        controller.observe([*drafts, StageTime(Stage.DECODE, 4, 4, STEP_MS)])
        total, count = total + spent + STEP_MS, count + 1
    assert 0 < waited < count
    assert total / count == pytest.approx(1.5 * STEP_MS, rel=0.02)


def test_prefills_of_drafting_requests_add_to_the_fairness_debt():
    controller = with_costs(Limits(max_slowdown=1.5))
    controller.observe_load(4)
    controller.limit_iteration(2, [], 1)
    controller.observe_prefill(60.0)
    assert controller.limit_iteration(2, [600], 1, num_plain=1) != (
        0,
        0,
    )  # no plain request was running
    controller.observe_prefill(60.0)
    waited = 0
    while controller.limit_iteration(2, [600], 1, num_plain=1) == (0, 0):
        controller.observe([StageTime(Stage.DECODE, 4, 4, STEP_MS)])
        waited += 1
    assert waited == math.ceil(60.0 / (0.5 * STEP_MS))


@pytest.mark.parametrize(
    ("limits", "num_plain", "mode"),
    [
        (Limits(), 1, "auto"),
        (Limits(max_slowdown=1.5), 0, "auto"),
        (Limits(max_slowdown=1.5), 1, "always"),
    ],
    ids=["no bound", "all of them draft", "drafting always"],
)
def test_no_fairness_debt_otherwise(limits: Limits, num_plain: int, mode: str):
    controller = replace(with_costs(limits), mode=mode)
    for _ in range(3):
        assert controller.limit_iteration(2, [600], 1, num_plain) == (controller.draft_chunk, 1)
        controller.observe(
            [StageTime(Stage.DRAFT, 2, 16, 60.0), StageTime(Stage.DECODE, 4, 4, STEP_MS)]
        )
