"""The controller's decisions, each on prices and cuts that leave no doubt."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.policy.acceptance import VerifyOutcome
from sglang_parse.core.policy.controller import (
    COLD_START_TOKENS,
    EARLY,
    PATIENCE,
    PRICE_EVERY,
    PRICE_SOON,
    RENEW_EVERY,
    RENEW_MS,
    RETRY_SHARE,
    SURE_TIMES,
    YOUNG,
    Controller,
)
from sglang_parse.core.policy.limits import Limits
from sglang_parse.core.policy.planner import Planner
from sglang_parse.core.policy.stage_cost import Stage, StageTime
from sglang_parse.core.policy.threshold_stats import COLD_START_PROBES, MAX_ACCOUNTS, stats_key

pytestmark = pytest.mark.unit

HALF, LOW = 0.5, 0.25
GOOD = VerifyOutcome(
    128, num_verified=128, num_segments=10, accepted_len=128, reject_end=None, is_finished=False
)
BAD = VerifyOutcome(
    COLD_START_TOKENS,
    num_verified=COLD_START_TOKENS,
    num_segments=1,
    accepted_len=0,
    reject_end=COLD_START_TOKENS,
    is_finished=False,
)
STEP_MS = 8.0
FREE = Limits()


def priced(limits: Limits = FREE, *, draft_step: float = 1.0, per_row: float = 0.02):
    """A controller that knows what its stages take."""
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


def play(controller: Controller, judged: VerifyOutcome, threshold: float = HALF, rounds: int = 10):
    for _ in range(rounds):
        controller.observe_round(threshold, judged)


@pytest.mark.parametrize(("mode", "drafts"), [("always", True), ("never", False)])
def test_forced_either_way(mode: str, drafts: bool):
    limits = Limits.of(ParseConfig(drafting=mode, draft_tokens=64), 20)
    controller = Controller(limits, mode)
    play(controller, BAD if drafts else GOOD)
    for threshold in (HALF, 1.5):
        plan = controller.plan(threshold)
        assert (plan is not None) is drafts
        if plan:
            assert (plan.draft_tokens, plan.max_prefixes, plan.draft_chunk) == (64, 16, 16)


def test_nothing_of_a_draft_can_pass_a_threshold_above_one():
    assert priced().plan(1.5) is None
    assert priced().plan(1.0) is not None


def test_an_unknown_threshold_sends_one_short_pilot_at_a_time():
    controller = priced()
    pilot = controller.plan(HALF)
    assert pilot is not None
    assert (pilot.draft_tokens, pilot.speedup) == (COLD_START_TOKENS, None)
    asked = [controller.plan(HALF) for _ in range(PATIENCE)]
    assert asked == [None] * PATIENCE
    assert controller.plan(HALF) is not None  # that one may be gone


def test_three_bad_pilots_and_drafting_rests():
    controller = priced(draft_step=2.0)
    for _ in range(COLD_START_PROBES):
        assert controller.plan(HALF) is not None
        controller.observe_round(HALF, BAD)
    assert controller.plan(HALF) is None
    assert controller.speedup is not None
    assert controller.speedup < 1


def test_good_drafts_are_long_and_bad_ones_short():
    good, middling = priced(), priced()
    play(good, GOOD)
    cut = VerifyOutcome(
        128, num_verified=128, num_segments=10, accepted_len=26, reject_end=38, is_finished=False
    )
    play(middling, cut)
    assert good.plan(HALF).draft_tokens == 128
    assert middling.plan(HALF).draft_tokens < 128


def test_drafts_pay_that_are_rejected_and_that_the_target_would_have_written():
    """Nothing is kept, and most of it comes with the cut."""
    controller, alike = priced(), BAD._replace(num_matched=COLD_START_TOKENS - 2)
    play(controller, BAD, LOW, rounds=30)
    play(controller, alike, HALF, rounds=30)
    assert controller.plan(LOW) is None
    assert controller.plan(HALF) is not None


def test_dear_rows_are_asked_fewer_questions():
    """Every prefix more costs its question's rows."""
    limits = Limits(question_rows=40)
    cheap, dear = priced(limits, per_row=0.001), priced(limits, per_row=2.0)
    for controller in (cheap, dear):
        play(controller, GOOD, rounds=5)
        play(controller, replace_cut(64, 77), rounds=1)
        play(controller, GOOD, rounds=10)
    assert dear.plan(HALF).max_prefixes < cheap.plan(HALF).max_prefixes


def replace_cut(cut: int, rejected: int) -> VerifyOutcome:
    return GOOD._replace(accepted_len=cut, reject_end=rejected)


def test_load_counts():
    """The draft model takes as long for each request more, the target not."""
    controller = Controller()
    for count in (1, 2, 4, 8, 16):
        controller.observe(
            [
                StageTime(Stage.DRAFT, count, 16, 32.0 * count),
                StageTime(Stage.DECODE, count, count, 8.0),
            ]
        )
        controller.observe([StageTime(Stage.VERIFY, 200 * count, 0, 60.0 * count)])
    play(controller, GOOD)
    answers = []
    for count in (1, 16, 1):
        controller.observe_load(count)
        answers.append(controller.plan(HALF) is not None)
    assert answers == [True, False, True]


def test_a_head_that_makes_the_target_faster_counts():
    controller = priced(draft_step=3.0)
    play(controller, GOOD)
    assert controller.plan(HALF) is not None
    for _ in range(100):
        controller.observe([StageTime(Stage.DECODE, 1, 4, STEP_MS)])
    assert [controller.plan(HALF) for _ in range(RENEW_EVERY)][-1] is None


def test_where_nothing_new_was_seen_the_plans_are_not_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
):
    """A look takes milliseconds, and those that rest ask again with every segment."""
    controller, looks = priced(), []
    look = Planner.best
    monkeypatch.setattr(Planner, "best", lambda *call: looks.append(call) or look(*call))
    controller.observe_load(16)
    play(controller, BAD, rounds=COLD_START_PROBES)
    for _ in range(4 * 16):
        controller.plan(HALF)
    assert 1 <= len(looks) <= 5


def test_each_threshold_has_its_own_account():
    controller = priced()
    play(controller, BAD, HALF, rounds=30)
    play(controller, GOOD, LOW, rounds=30)
    assert controller.plan(HALF) is None
    assert controller.plan(LOW) is not None


def test_requests_whose_drafts_fail_have_an_account_of_their_own():
    """Some questions are too hard for the draft model; the others' drafts go on."""
    controller = priced(draft_step=2.0)
    play(controller, GOOD, rounds=30)
    for _ in range(10):
        controller.observe_round(HALF, BAD, num_failed=1)
        controller.observe_round(HALF, BAD, num_failed=7)
    assert controller.plan(HALF) is not None
    assert controller.plan(HALF, num_failed=1) is None
    assert controller.plan(HALF, num_failed=3) is None


def test_those_that_wait_for_others_bursts_count():
    """What pays for eight that all draft may not for one beside seven that rest."""
    controller = priced(draft_step=1.5)
    play(controller, replace_cut(40, 52), rounds=30)
    controller.observe_load(8)
    assert controller.plan(HALF) is not None
    controller.observe_load(8, [None] * 7)
    for _ in range(math.ceil(RENEW_MS / STEP_MS) + RENEW_EVERY):
        controller.observe([StageTime(Stage.DECODE, 8, 8, STEP_MS)])
        last = controller.plan(HALF)
    assert last is None


def test_a_look_at_all_plans_is_not_taken_with_every_ask(monkeypatch: pytest.MonkeyPatch):
    """It takes milliseconds, and each of 16 requests that rest asks with every token it writes."""
    controller, looks = priced(draft_step=4.0), []
    controller.observe_load(16, [stats_key(HALF)] * 16)
    play(controller, BAD, rounds=YOUNG)
    best = Planner.best
    monkeypatch.setattr(Planner, "best", lambda *args: looks.append(1) or best(*args))
    for _ in range(100):
        controller.observe([StageTime(Stage.DECODE, 16, 16, STEP_MS)])
        for _ in range(16):
            controller.plan(HALF)
    assert 1 <= len(looks) <= 1 + 100 * STEP_MS / RENEW_MS


def test_a_new_threshold_begins_as_its_neighbours_stand():
    """A stricter threshold keeps no more: what is known of a laxer one is where it begins."""
    controller = priced()
    play(controller, BAD, LOW, rounds=30)
    controller.observe_round(HALF, BAD)
    alone = priced()
    alone.observe_round(HALF, BAD)
    controller.plan(HALF)
    informed = controller.speedup
    alone.plan(HALF)
    assert informed < alone.speedup


def test_no_more_accounts_than_there_should_be():
    controller = priced(draft_step=2.0)
    play(controller, BAD, HALF)
    for i in range(MAX_ACCOUNTS - 1):
        controller.plan(i / 1000)
        assert controller.plan(HALF) is None  # used lately, so kept
    for i in range(MAX_ACCOUNTS):
        controller.plan(0.6 + i / 1000)
    assert controller.plan(HALF) is not None  # forgotten


def test_trials_are_single_and_lose_a_bounded_share():
    controller = priced(draft_step=4.0)
    controller.observe_load(4, [stats_key(HALF)] * 4)
    play(controller, BAD, rounds=30)
    steps = trials = 0
    while trials < 12 and steps < 20_000:
        steps += 1
        controller.observe([StageTime(Stage.DECODE, 4, 4, STEP_MS)])
        asked = [controller.plan(HALF) for _ in range(4)]
        assert sum(plan is not None for plan in asked) <= 1
        for plan in filter(None, asked):
            assert plan.draft_tokens == COLD_START_TOKENS
            trials += 1
            controller.observe_round(HALF, BAD)
    assert trials == 12
    trial_ms = COLD_START_TOKENS * 4.0 + STEP_MS  # what it emits saves less than a step
    num_early = math.log2(EARLY)
    assert (trials - num_early) * trial_ms <= 1.1 * RETRY_SHARE * steps * STEP_MS + trial_ms


def test_the_first_trials_come_soon():
    """Prices of a server's first seconds may be those of a machine that is busy starting it."""
    controller = priced()
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
    for _ in range(RENEW_EVERY):
        controller.observe([StageTime(Stage.DECODE, 1, 1, STEP_MS)])
        last = controller.plan(HALF)
    assert last is not None


def test_all_accounts_that_rest_share_the_time_for_trials():
    """Requests differ in how often they failed: their trials together are as rare as one's."""

    def trials(kinds: int) -> int:
        controller, count = priced(draft_step=4.0), 0
        controller.observe_load(4, [stats_key(HALF, i % kinds) for i in range(4)])
        play(controller, BAD, rounds=30)
        for _ in range(12_000):
            controller.observe([StageTime(Stage.DECODE, 4, 4, STEP_MS)])
            for i in range(4):
                if controller.plan(HALF, i % kinds):
                    count += 1
                    controller.observe_round(HALF, BAD, i % kinds)
        return count

    assert 4 <= trials(4) <= 1.2 * trials(1)


def test_it_comes_back_when_trials_go_well():
    controller = priced()
    controller.observe_load(1, [stats_key(HALF)])
    play(controller, BAD, rounds=30)
    trials = 0
    for _ in range(20_000):
        controller.observe([StageTime(Stage.DECODE, 1, 1, STEP_MS)])
        if controller.plan(HALF):
            trials += 1
            controller.observe_round(
                HALF,
                GOOD._replace(
                    num_drafted=COLD_START_TOKENS,
                    num_verified=COLD_START_TOKENS,
                    accepted_len=COLD_START_TOKENS,
                    num_segments=1,
                ),
            )
        if trials == 60:
            break
    assert all(controller.plan(HALF) for _ in range(5))


@pytest.mark.parametrize(("burst_ms", "times"), [(96.0, 1), (16.0, SURE_TIMES)])
def test_the_plain_targets_price_is_taken_anew(burst_ms: float, times: int):
    """More seldom where it would have to be far off to matter."""
    controller = Controller()
    play(controller, GOOD)
    assert controller.plan(HALF) is None  # not known yet
    controller.observe(
        [StageTime(Stage.DECODE, 1, 1, 8.0), StageTime(Stage.DRAFT, 1, 16, burst_ms)]
    )
    every = times * PRICE_SOON  # at first: what a server's first steps took may be of its start
    while every < times * PRICE_EVERY:
        asked = [controller.plan(HALF) is not None for _ in range(every + 1)]
        assert asked == [True] * every + [False]
        controller.observe([StageTime(Stage.DECODE, 1, 1, 8.0)])
        every *= 2
    asked = [controller.plan(HALF) is not None for _ in range(every + 1)]
    assert asked == [True] * every + [False]


# -- what settings leave to decide --------------------------------------------------


def test_what_was_given_is_fixed():
    config = ParseConfig(draft_tokens=48, draft_chunk=8)
    limits = Limits.of(config, 20)
    assert limits.fixed == {"draft_tokens", "draft_chunk"}
    controller = priced(limits)
    assert controller.plan(HALF).draft_tokens == 48  # the pilot, too
    play(controller, replace_cut(4, 12)._replace(num_drafted=48, num_verified=48))
    for _ in range(10):
        if plan := controller.plan(HALF):
            assert (plan.draft_tokens, plan.draft_chunk) == (48, 8)
    assert Limits.of(ParseConfig(), 20).fixed == frozenset()


def test_a_simulated_share_is_of_drafts_as_long_as_the_settings_say():
    """Of short ones it would be the same share, which no draft model's drafts have."""
    limits = Limits.of(ParseConfig(), 20, is_simulated=True)
    assert limits.fixed == {"draft_tokens", "max_prefixes"}
    assert priced(limits).plan(HALF).draft_tokens == ParseConfig().draft_tokens  # the pilot, too


def test_nothing_depends_on_the_clock_where_answers_must_be_the_same_again():
    limits = Limits.of(ParseConfig(), 20, is_timed=False)
    assert limits.fixed == {"draft_tokens", "max_prefixes", "draft_chunk"}
    assert (limits.max_itl_ratio, limits.max_draft_latency_ms, limits.draft_chunk) == (0, 0, 16)


def test_a_rounds_silence_has_a_bound():
    free, bound = priced(), priced(Limits(max_draft_latency_ms=60.0))
    for controller in (free, bound):
        play(controller, GOOD)
    assert free.plan(HALF).draft_tokens == 128  # 128 ms of drafting
    assert bound.plan(HALF).draft_tokens <= 52
    impossible = priced(Limits(max_draft_latency_ms=1.0))
    play(impossible, GOOD)
    assert impossible.plan(HALF).draft_tokens <= 24


# -- iterations -------------------------------------------------------------------


def test_where_nobody_waits_all_that_is_ready_goes():
    controller = priced(Limits(max_itl_ratio=2.5))
    assert controller.limit_iteration(3, [200, 200], 0) == (16, 2)


def test_those_who_could_join_a_pass_are_waited_for_where_nobody_writes():
    controller = priced(Limits(max_itl_ratio=2.5))
    assert controller.limit_iteration(3, [200, 200], 0, may_join=True) == (16, 0)
    assert controller.limit_iteration(0, [200, 200], 0, may_join=True) == (16, 2)  # nobody is left
    assert controller.limit_iteration(3, [200], 1, may_join=True)[1] == 1
    assert replace(controller, mode="always").limit_iteration(3, [200], 0, may_join=True)[1] == 1


def test_who_continues_waits_for_no_more_than_the_bound():
    controller = priced(Limits(max_itl_ratio=2.5, question_rows=10))
    controller.observe_load(4)
    play(controller, GOOD)
    controller.plan(HALF)
    burst, judged = controller.limit_iteration(2, [], 2)
    assert burst * 1.0 + STEP_MS <= 2.5 * STEP_MS + 1
    assert judged == 0
    burst, judged = controller.limit_iteration(0, [600, 600, 600], 1)
    assert judged == 1  # each pass takes 20 ms
    assert controller.limit_iteration(2, [5000], 1) == (1, 1)  # somebody moves, whatever it takes


def test_a_fixed_burst_is_not_shortened():
    limits = Limits(max_itl_ratio=2.5, draft_chunk=64, fixed=frozenset({"draft_chunk"}))
    controller = priced(limits)
    assert controller.limit_iteration(2, [], 2) == (64, 0)


def test_without_a_bound_all_goes():
    controller = replace(priced(), num_running=4)
    play(controller, GOOD)
    controller.plan(HALF)
    assert controller.limit_iteration(2, [600] * 3, 1) == (controller.draft_chunk, 3)


def test_what_an_iteration_took_too_long_for_those_that_never_draft_is_made_good():
    """Over the iterations they take as long as the bound says, whatever one of them takes."""
    controller = priced(Limits(max_slowdown=1.5))
    controller.observe_load(4)
    waited, total, count = 0, 0.0, 0
    for _ in range(200):
        burst, judged = controller.limit_iteration(2, [600], 1, num_plain=1)
        assert (burst, judged) in {(controller.draft_chunk, 1), (0, 0)}
        spent = 60.0 if judged else 0.0
        waited += not judged
        bursts = [StageTime(Stage.DRAFT, 2, burst, spent)] if burst else []
        controller.observe([*bursts, StageTime(Stage.DECODE, 4, 4, STEP_MS)])
        total, count = total + spent + STEP_MS, count + 1
    assert 0 < waited < count
    assert total / count == pytest.approx(1.5 * STEP_MS, rel=0.1)


def test_prefills_of_requests_that_draft_are_made_good_too():
    controller = priced(Limits(max_slowdown=1.5))
    controller.observe_load(4)
    controller.limit_iteration(2, [], 1)
    controller.observe_prefill(60.0)
    assert controller.limit_iteration(2, [600], 1, num_plain=1) != (
        0,
        0,
    )  # nobody was there to wait for it
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
def test_otherwise_nobody_is_owed_anything(limits: Limits, num_plain: int, mode: str):
    controller = replace(priced(limits), mode=mode)
    for _ in range(3):
        assert controller.limit_iteration(2, [600], 1, num_plain) == (controller.draft_chunk, 1)
        controller.observe(
            [StageTime(Stage.DRAFT, 2, 16, 60.0), StageTime(Stage.DECODE, 4, 4, STEP_MS)]
        )
