"""The controller's decisions, with costs and acceptance far from any tie."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.phases import DraftKey
from sglang_parse.core.policy.constants import DEFAULTS
from sglang_parse.core.policy.controller import Controller
from sglang_parse.core.policy.limits import Limits
from sglang_parse.core.round import Round
from sglang_parse.core.stage import Stage, StageTime
from support.replay import Controlled, Costs, Fixed, Replay, Segment
from support.rounds import round_of

pytestmark = pytest.mark.unit

HALF: DraftKey = (0.5, "")
LOW: DraftKey = (0.25, "")
STEP_MS = 8.0
FREE = Limits(fixed=frozenset({"max_prefixes"}))
COSTS = Costs(
    draft_step=lambda _: 1.0,
    verify=lambda rows: STEP_MS + 0.02 * rows,
    decode=lambda _: STEP_MS,
    prefill=lambda _: STEP_MS,
)


def outcome(num_drafted: int, accepted_len: int, *, num_matched: int = 0) -> Round:
    return round_of(num_drafted, num_drafted, accepted_len, num_matched=num_matched)


def with_costs(limits: Limits = FREE, *, draft_step: float = 1.0, per_row: float = 0.02):
    """A controller that has observed all stages, each size often enough to be believed."""
    controller = Controller(limits)
    for size in (1, 2, 4, 8, 16):
        for _ in range(1 + DEFAULTS.cold_forwards):
            verify = StageTime(Stage.VERIFY, 200 * size, 0, STEP_MS + per_row * 200 * size)
            controller.observe(
                [
                    StageTime(Stage.DRAFT, size, 16, 16 * draft_step),
                    verify,
                    StageTime(Stage.DECODE, size, size, STEP_MS),
                ],
                [(None, 1)] * size,
            )
    return controller


Accepts = Callable[[int], int]
"""Draft tokens -> accepted ones."""


def run(
    controller: Controller,
    keys: Sequence[DraftKey],
    accepts: dict[DraftKey, Accepts],
    rounds: int,
    *,
    per_step: int = 1,
) -> list:
    """All requests draft and are verified together, or decode ``per_step`` tokens; returns their
    plans."""
    count, plans = len(keys), []
    controller.num_running = count
    for _ in range(rounds):
        found = [controller.plan(key) for key in keys]
        plans += found
        drafts = [(key, plan.draft_tokens) for key, plan in zip(keys, found, strict=True) if plan]
        outputs: list = [(key if plan else None, 1) for key, plan in zip(keys, found, strict=True)]
        if not drafts:
            step = StageTime(Stage.DECODE, count, per_step * count, STEP_MS)
            controller.observe([step], [(None, per_step)] * count)
            continue
        longest, rows = max(n for _, n in drafts), count + sum(n for _, n in drafts)
        verify = StageTime(Stage.VERIFY, rows, 0, STEP_MS + 0.02 * rows)
        for i, (key, plan) in enumerate(zip(keys, found, strict=True)):
            if plan:
                accepted = min(plan.draft_tokens, accepts[key](plan.draft_tokens))
                controller.observe_round(key, outcome(plan.draft_tokens, accepted))
                outputs[i] = (key, accepted + 1)
        draft = StageTime(Stage.DRAFT, len(drafts), longest, longest * 1.0)
        controller.observe([draft, verify], outputs)
    return plans


def all_of(length: int) -> int:
    return length


def none_of(_: int) -> int:
    return 0


def answers(run: int, count: int, length: int = 240) -> list[list[Segment]]:
    """Answers in which the draft errs after each ``run`` tokens."""
    errs = [Segment(run + 1, True, run)] * (length // (run + 1))
    return [errs or [Segment(length, False, length)]] * count


def replay(scripts: Sequence, requests: int, policy: object, costs: Costs = COSTS) -> float:
    return Replay(scripts, requests, costs, policy, 0, every_token=True).run()


PLAIN = Fixed(drafts=False)

# -- whether to draft -------------------------------------------------------------


@pytest.mark.parametrize(("mode", "drafts"), [("always", True), ("never", False)])
def test_fixed_modes(mode: str, drafts: bool):
    limits = Limits.of(ParseConfig(judge="question", drafting=mode, draft_tokens=64), 20)
    controller = Controller(limits, mode)
    run(controller, [HALF], {HALF: none_of if drafts else all_of}, 20)
    for threshold in (0.5, 1.5):
        plan = controller.plan((threshold, ""))
        assert (plan is not None) is drafts
        if plan:
            assert (plan.draft_tokens, plan.max_prefixes, plan.draft_chunk) == (64, 16, 16)


@pytest.mark.parametrize("mode", ["auto", "never"])
def test_a_request_may_ask_for_drafts_that_do_not_pay(mode: str):
    config = ParseConfig(judge="question", drafting=mode, draft_tokens=64)
    controller = Controller(Limits.of(config, 20), mode)
    run(controller, [HALF], {HALF: none_of}, 40)
    for threshold in (0.5, 1.5):
        assert controller.plan((threshold, "")) is None
        plan = controller.plan((threshold, ""), always=True)
        assert plan is not None
        assert (plan.draft_tokens, plan.max_prefixes, plan.speedup) == (64, 16, None)


def test_forced_drafts_are_short():
    plan = with_costs().plan((1.5, ""), always=True)
    assert plan is not None
    assert plan.draft_tokens == DEFAULTS.probe_tokens


def test_a_threshold_above_one_never_drafts():
    controller = with_costs()
    assert controller.plan((1.5, "")) is None
    assert controller.no_draft_reason == "a threshold above 1 accepts no draft"
    assert with_costs().plan((1.0, "")) is not None


def test_decode_steps_are_timed_before_the_first_draft():
    """Drafting is compared with them."""
    controller = Controller(FREE)
    for _ in range(1 + DEFAULTS.cold_forwards):
        assert controller.plan(HALF) is None
        assert controller.no_draft_reason.startswith("plain decoding is being timed")
        controller.observe([StageTime(Stage.DECODE, 1, 1, STEP_MS)], [(None, 1)])
    plan = controller.plan(HALF)
    assert plan is not None
    assert (plan.draft_tokens, plan.speedup) == (DEFAULTS.probe_tokens, None)


def test_drafts_begin_where_no_step_can_be_timed():
    """As where texts draft for all other requests."""
    controller = Controller(FREE)
    asked = [controller.plan(HALF) for _ in range(9)]
    assert asked[:-1] == [None] * 8
    assert asked[-1] is not None


def test_refused_drafts_suspend_drafting():
    controller = with_costs()
    plans = run(controller, [HALF], {HALF: none_of}, 30)
    assert plans[-1] is None
    assert controller.speedup is not None
    assert controller.speedup < 1
    reason = f"drafting suspended: speedup {controller.speedup:.2f}, below 1"
    assert controller.no_draft_reason == reason


def test_good_drafts_are_long():
    good, mediocre = with_costs(), with_costs()
    longest = run(good, [HALF], {HALF: all_of}, 30)[-1]
    shorter = run(mediocre, [HALF], {HALF: lambda length: min(length, 26)}, 60)[-1]
    assert longest.draft_tokens == 128
    assert shorter.draft_tokens < 128


def test_the_speedup_is_measured():
    """128 tokens in 128 ms of drafting and a pass."""
    controller = with_costs()
    run(controller, [HALF], {HALF: all_of}, 60)
    expected = 129 * STEP_MS / (128 + STEP_MS + 0.02 * 129)
    assert controller.speedup == pytest.approx(expected, rel=0.02)


def test_matched_tokens_make_rejected_drafts_pay():
    for matched, pays in ((0, False), (14, True)):
        controller = with_costs()
        for _ in range(40):
            plan = controller.plan(HALF)
            if plan is None:
                controller.observe([StageTime(Stage.DECODE, 1, 1, STEP_MS)], [(None, 1)])
                continue
            found = min(matched, plan.draft_tokens)
            controller.observe_round(HALF, outcome(plan.draft_tokens, 0, num_matched=found))
            draft = StageTime(Stage.DRAFT, 1, plan.draft_tokens, 1.0 * plan.draft_tokens)
            verify = StageTime(Stage.VERIFY, 1 + plan.draft_tokens, 0, STEP_MS)
            controller.observe([draft, verify], [(HALF, found + 1)])
        assert (controller.plan(HALF) is not None) is pays


def test_every_prefix_costs_its_question():
    controller = with_costs(Limits(question_rows=40))
    assert controller.plan(HALF).max_prefixes == 1
    assert with_costs().plan(HALF).max_prefixes == 16


def test_decisions_depend_on_load():
    """Draft cost grows with the number of requests, decode cost does not."""
    costs = replace(COSTS, draft_step=lambda count: 2.0 * count, verify=lambda rows: 8 + rows / 4)
    controlled = Controlled(Controller(FREE))
    rates = {
        n: replay(answers(40, 20 * n), n, controlled, costs)
        / replay(answers(40, 20 * n), n, PLAIN, costs)
        for n in (1, 16, 2)
    }
    assert rates[1] > 1.5
    assert rates[16] >= 0.93
    assert rates[2] > 1.05


def test_more_tokens_per_decode_step_make_drafting_pay_less():
    controller = with_costs()
    assert run(controller, [HALF], {HALF: lambda _: 12}, 30)[-1] is not None
    for _ in range(100):
        controller.observe([StageTime(Stage.DECODE, 1, 5, STEP_MS)], [(None, 5)])
    assert run(controller, [HALF], {HALF: lambda _: 12}, 60, per_step=5)[-1] is None


@pytest.mark.parametrize("other", [LOW, (0.5, "adapter")], ids=["threshold", "adapter"])
def test_keys_have_statistics_of_their_own(other: DraftKey):
    """Rejected drafts of one do not suspend those of the other, also side by side."""
    controller = with_costs()
    run(controller, [HALF, HALF, other, other], {HALF: all_of, other: none_of}, 60)
    assert controller.plan(HALF) is not None
    assert controller.plan(other) is None


def test_a_request_whose_drafts_fail_rests():
    """Some prompts are too hard for the draft model; the others still draft."""
    controller = with_costs()
    length = run(controller, [HALF], {HALF: all_of}, 30)[-1].draft_tokens
    for num_rests in (1, 2, 3):
        asked = [controller.plan(HALF, DEFAULTS.max_failed - 1 + num_rests) for _ in range(16)]
        found = [plan.draft_tokens for plan in asked if plan]
        assert found == [length >> num_rests] * (16 >> num_rests)
    assert controller.plan(HALF).draft_tokens == length


def test_requests_that_decode_count():
    """Drafts that pay for one request are suspended where seven others wait for them too long."""
    controller = with_costs()
    controller.num_running = 8
    for _ in range(60):
        plan = controller.plan(HALF)
        if plan is None:
            break
        num_output = 1 + plan.draft_tokens // 2
        controller.observe_round(HALF, outcome(plan.draft_tokens, plan.draft_tokens // 2))
        draft = StageTime(Stage.DRAFT, 1, plan.draft_tokens, 1.0 * plan.draft_tokens)
        verify = StageTime(Stage.VERIFY, 8 + plan.draft_tokens, 0, STEP_MS)
        controller.observe([draft, verify], [(HALF, num_output), *[(None, 1)] * 7])
        assert num_output * STEP_MS / (plan.draft_tokens + STEP_MS) > 1.1  # for itself
    assert controller.plan(HALF) is None


def test_a_new_threshold_expects_what_the_nearest_one_does():
    controller = with_costs()
    run(controller, [LOW], {LOW: lambda length: min(length, 4)}, 40)
    known = controller.plan(LOW, always=True).draft_tokens
    assert controller.plan(HALF).draft_tokens <= max(8, known)
    assert with_costs().plan(HALF).draft_tokens > 8


def test_the_number_of_keys_is_bounded():
    controller = with_costs()
    run(controller, [HALF], {HALF: none_of}, 40)
    for i in range(DEFAULTS.max_keys - 1):
        controller.plan((i / 1000, ""))
        assert controller.plan(HALF) is None  # recently used, so kept
    for i in range(DEFAULTS.max_keys):
        controller.plan((0.6 + i / 1000, ""))
    assert controller.plan(HALF) is not None  # forgotten


def test_hopeless_drafting_costs_little():
    """At first 8 %, in the long run half a percent."""
    refused = answers(0, 200)
    for requests in (1, 16):
        rate = replay(refused, requests, Controlled(Controller(FREE)))
        assert rate >= 0.97 * replay(refused, requests, PLAIN)


def test_probes_come_one_at_a_time():
    controller = with_costs()
    run(controller, [HALF] * 4, {HALF: none_of}, 60)
    plans = run(controller, [HALF] * 4, {HALF: none_of}, 4000)
    by_round = [plans[i : i + 4] for i in range(0, len(plans), 4)]
    probes = [sum(plan is not None for plan in found) for found in by_round]
    assert set(probes) == {0, 1}
    assert 2 <= sum(probes) <= 40
    assert {plan.draft_tokens for plan in plans if plan} == {DEFAULTS.probe_tokens}


def test_a_lost_probe_is_sent_again():
    """Its request may have been aborted."""
    controller = with_costs()
    run(controller, [HALF], {HALF: none_of}, 40)
    sent = 0
    for _ in range(20_000):
        controller.observe([StageTime(Stage.DECODE, 1, 1, STEP_MS)], [(None, 1)])
        sent += controller.plan(HALF) is not None
    assert 2 <= sent <= 20_000 / DEFAULTS.retry_every


@pytest.mark.parametrize("requests", [1, 16])
def test_an_unlucky_start_costs_little(requests: int):
    """Of 200 answers: 13 % if the first ones are refused, 10 % if first forwards compile."""
    good, refused = answers(40, 200), answers(0, 16)
    best = replay(good, requests, Controlled(Controller(FREE)))
    apart = 16 / replay(refused, requests, PLAIN) + 184 / best
    rate = replay([*refused, *good[16:]], requests, Controlled(Controller(FREE)))
    assert rate >= 0.87 * 200 / apart
    for cold_ms in (15.0, 300.0):
        for stage in (Stage.DRAFT, Stage.VERIFY):
            cold = Replay(
                *(good, requests, COSTS, Controlled(Controller(FREE)), 0),
                every_token=True,
                cold_ms={stage: cold_ms},
            )
            tokens_per_s = cold.run()
            own_ms = cold.num_tokens * 1e3 / best
            assert cold.ms - cold.total_cold_ms <= own_ms / 0.9, (stage, cold_ms, tokens_per_s)


def test_drafting_resumes_where_it_pays_again():
    """Half of the answers are refused; the rest gains as much as a new server's."""
    good, bad = answers(40, 100), answers(0, 100)
    both = replay([*bad, *good], 4, Controlled(Controller(FREE)))
    apart = [1 / replay(scripts, 4, Controlled(Controller(FREE))) for scripts in (bad, good)]
    assert both >= 0.9 * 2 / sum(apart)


# -- settings ---------------------------------------------------------------------


def test_given_settings_are_fixed():
    config = ParseConfig(judge="question", draft_tokens=48, draft_chunk=8)
    limits = Limits.of(config, 20)
    assert limits.fixed == {"draft_tokens", "draft_chunk"}
    controller = with_costs(limits)
    plans = run(controller, [HALF], {HALF: lambda _: 4}, 60)
    assert {(plan.draft_tokens, plan.draft_chunk) for plan in plans if plan} == {(48, 8)}
    assert Limits.of(ParseConfig(judge="question"), 20).fixed == frozenset()
    assert Limits.of(ParseConfig(judge="likelihood"), 0).fixed == {"max_prefixes"}


def test_simulated_acceptance_fixes_the_draft_length():
    """Its ratio does not depend on the length, unlike a draft model's."""
    limits = Limits.of(ParseConfig(), 20, fixed_ratio=True)
    assert limits.fixed == {"draft_tokens", "max_prefixes"}
    assert with_costs(limits).plan(HALF).draft_tokens == ParseConfig().draft_tokens


def test_deterministic_inference_ignores_wall_times():
    limits = Limits.of(ParseConfig(), 20, is_timed=False)
    assert limits.fixed == {"draft_tokens", "max_prefixes", "draft_chunk"}
    assert (limits.max_itl_ratio, limits.max_slowdown, limits.draft_chunk) == (0, 0, 16)
    slow, fast = (Controller(limits, "always") for _ in range(2))
    slow.observe([StageTime(Stage.DECODE, 4, 4, 900.0)], [(HALF, 1)] * 4)
    for controller in (slow, fast):
        assert not controller.is_timed
        assert controller.plan(HALF).draft_tokens == 128
        assert controller.limit_iteration(2, [600] * 3, 1) == (16, 3)
        assert controller.extra_cost(32) == controller.steps_in(9.0) == 0


# -- iterations -------------------------------------------------------------------


def bounded(**bounds: float) -> Controller:
    controller = with_costs(replace(FREE, **bounds))
    controller.num_running = 4
    return controller


def test_no_limit_if_no_request_decodes():
    assert bounded(max_itl_ratio=2.5).limit_iteration(3, [200, 200], 0) == (128, 2)


def test_ready_drafts_wait_for_others_that_may_join_if_no_request_decodes():
    controller = bounded(max_itl_ratio=2.5)
    assert controller.limit_iteration(3, [200, 200], 0, may_join=True) == (128, 0)
    nobody_drafts = controller.limit_iteration(0, [200, 200], 0, may_join=True)
    assert nobody_drafts == (128, 2)
    assert controller.limit_iteration(3, [200], 1, may_join=True)[1] == 1
    assert Controller(FREE, "always").limit_iteration(3, [200], 0, may_join=True)[1] == 1


def test_itl_of_decoding_requests_is_bounded():
    controller = bounded(max_itl_ratio=2.5)
    chunk, num_verified = controller.limit_iteration(2, [], 2)
    assert 1 < chunk * 1.0 + STEP_MS <= 2.5 * STEP_MS + 1
    assert num_verified == 0
    chunk, num_verified = controller.limit_iteration(0, [600, 600, 600], 1)
    assert num_verified == 1  # each verify pass takes 20 ms
    assert controller.limit_iteration(2, [5000], 1) == (1, 1)  # at least one of each


def test_a_fixed_chunk_is_not_shortened():
    controller = bounded(max_itl_ratio=2.5, draft_chunk=64, fixed=frozenset({"draft_chunk"}))
    assert controller.limit_iteration(2, [], 2) == (64, 0)


def test_chunks_take_turns_with_decode_steps_without_a_bound():
    """Equal parts of the draft, of about ``chunk_steps`` decode steps each."""
    controller = bounded()
    run(controller, [HALF], {HALF: all_of}, 30)
    chunk, num_verified = controller.limit_iteration(2, [600] * 3, 1)
    assert num_verified == 3
    assert chunk == math.ceil(128 / round(128 / (DEFAULTS.chunk_steps * STEP_MS)))


def test_fairness_debt_bounds_the_mean_iteration_of_plain_requests():
    """A verify pass may exceed the bound, and is made good for."""
    controller = bounded(max_slowdown=1.5)
    waited, total, count = 0, 0.0, 0
    for _ in range(200):
        chunk, num_verified = controller.limit_iteration(2, [600], 1, num_plain=1)
        assert (chunk, num_verified) in {(1, 1), (0, 0)}
        waited += not num_verified
        spent = 60.0 if num_verified else 0.0
        drafts = [StageTime(Stage.DRAFT, 2, 16, spent)] if num_verified else []
        step = StageTime(Stage.DECODE, 4, 4, STEP_MS)
        controller.observe([*drafts, step], [(None, 1)] * 4)
        total, count = total + spent + STEP_MS, count + 1
    assert 0 < waited < count
    assert total / count == pytest.approx(1.5 * STEP_MS, rel=0.03)


def test_drafting_beside_plain_requests_fits_the_bound_of_each_iteration():
    """Allowance that an iteration leaves is lost."""
    controller = bounded(max_slowdown=1.5)
    chunk, _ = controller.limit_iteration(2, [], 2, num_plain=1)
    assert chunk == 4  # half a decode step


def test_prefills_of_drafting_requests_add_to_the_fairness_debt():
    controller = bounded(max_slowdown=1.5)
    controller.limit_iteration(2, [], 1)
    controller.observe_prefill(60.0)
    # No plain request was running.
    assert controller.limit_iteration(2, [600], 1, num_plain=1) != (0, 0)
    controller.observe_prefill(60.0)
    waited = 0
    while controller.limit_iteration(2, [600], 1, num_plain=1) == (0, 0):
        controller.observe([StageTime(Stage.DECODE, 4, 4, STEP_MS)], [(None, 1)] * 4)
        waited += 1
    assert waited == math.ceil(60.0 / (0.5 * STEP_MS))


@pytest.mark.parametrize(
    ("limits", "num_plain", "mode"),
    [
        (FREE, 1, "auto"),
        (replace(FREE, max_slowdown=1.5), 0, "auto"),
        (replace(FREE, max_slowdown=1.5), 1, "always"),
    ],
    ids=["no bound", "all of them draft", "drafting always"],
)
def test_no_fairness_debt_otherwise(limits: Limits, num_plain: int, mode: str):
    controller = with_costs(limits)
    controller.mode = mode
    for _ in range(3):
        chunk, num_verified = controller.limit_iteration(2, [600], 1, num_plain)
        assert chunk > 1
        assert num_verified == 1
        stages = [StageTime(Stage.DRAFT, 2, 16, 60.0), StageTime(Stage.DECODE, 4, 4, STEP_MS)]
        controller.observe(stages, [(None, 1)] * 4)


def test_cost_of_a_pass_at_the_load():
    controller = Controller()
    assert controller.extra_cost(32) == 1.0  # before anything is measured
    controller = with_costs()
    controller.num_running = 2
    # 400 rows take as long as two decode steps, of two tokens each.
    assert controller.extra_cost(399) == pytest.approx(2.0, rel=0.02)


def test_drafts_of_one_pass_share_what_it_costs_beside_its_rows():
    """A pass takes half as long again as a step, whatever its rows. Six requests that each had to
    pay that alone would never draft."""
    shared, alone = Controller(FREE), Controller(FREE)
    for controller, share in ((shared, 1.0), (alone, 1 / 6)):
        controller.num_running = 6
        for rows in [6, 12, 24, 48] * 30:
            timed = StageTime(Stage.VERIFY, rows, 0, 1.5 * STEP_MS, share=share)
            if rows == 6:
                timed = StageTime(Stage.DECODE, 6, 6, STEP_MS, num_rows=6)
            controller.observe([timed], [(None, 1)] * 6)
    assert shared.extra_cost(5) == pytest.approx(0.5, rel=0.1)
    assert alone.extra_cost(7) == pytest.approx(3, rel=0.1)


def test_what_the_draft_model_would_bring():
    assert Controller().drafted_tokens(HALF) == 1  # nothing is timed
    controller = with_costs()
    expected = controller.drafted_tokens(HALF)
    assert expected > 1
    run(controller, [HALF], {HALF: all_of}, 60)
    assert controller.drafted_tokens(HALF) == pytest.approx(controller.speedup) != expected
    controller.stats(HALF).switch(1).is_on = False
    assert controller.drafted_tokens(HALF) == 1


# -- an EAGLE-3 head -------------------------------------------------------------------


def test_a_text_competes_with_what_the_head_would_bring():
    """A step of two tokens: a text has to bring one more than beside plain steps."""
    with_head, without = (Controller(FREE) for _ in range(2))
    for _ in range(200):
        for controller, num_tokens in ((with_head, 2), (without, 1)):
            controller.observe(
                [StageTime(Stage.DECODE, 1, num_tokens, STEP_MS, num_rows=1)], [(None, num_tokens)]
            )
    assert without.extra_cost(1) == 0
    assert with_head.extra_cost(1) == pytest.approx(1, abs=0.05)
