"""Drafts that end where the draft model is unsure: levels, what is learned, and the rule."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.doubt import LEVELS, Chances, Doubt, are_in_doubt, own_chance
from sglang_parse.core.phases import DraftPlan, Phase, RequestPolicy
from sglang_parse.core.policy.controller import Controller
from sglang_parse.core.policy.drafting import Acceptance
from sglang_parse.core.policy.limits import ADAPTIVE, Limits
from sglang_parse.core.request import RequestState
from sglang_parse.core.round import Round
from sglang_parse.core.stage import Stage, StageTime
from support.rounds import round_of

pytestmark = pytest.mark.unit

KEY, SURE = (0.5, ""), LEVELS - 1
HALF = Doubt([0.5] * LEVELS, least=0.3)


def drafted(num_drafted: int, num_output: int, levels: Sequence[int], *, in_doubt=False) -> Round:
    one = round_of(num_drafted, num_drafted, num_output)
    one.draft.levels, one.draft.in_doubt = [*levels], in_doubt
    return one


def test_before_the_first_draft_a_token_is_as_likely_as_the_draft_model_says():
    chances = Chances().by_level()
    assert chances == [own_chance(level) for level in range(LEVELS)] == sorted(chances)
    assert 0 < chances[0] < 1 / 3 < 0.999 < chances[-1] < 1


@pytest.mark.parametrize("truth", [lambda level: 1 - (1 - own_chance(level)) / 4, lambda _: 0.7])
def test_chances_are_learned_from_what_was_accepted(truth):
    """Of a judge that is lenient, and of a draft model whose sureness tells nothing."""
    draws, chances = random.Random(7), Chances()
    for _ in range(4000):
        levels = [draws.randrange(LEVELS) for _ in range(8)]
        refused = (i for i, level in enumerate(levels) if draws.random() > truth(level))
        chances.observe(levels, next(refused, len(levels)), keep=1 - 1 / 2000)
    assert chances.by_level() == pytest.approx([*map(truth, range(LEVELS))], abs=0.04)


def test_tokens_behind_a_refused_one_tell_nothing():
    chances = Chances()
    chances.observe([SURE, 3, 5, 5], num_output=1, keep=1.0)
    own, found = Chances().by_level(), chances.by_level()
    assert [i for i in range(LEVELS) if found[i] != own[i]] == [3, SURE]
    assert found[3] == own[3] / 2
    assert found[SURE] > own[SURE]


def test_what_was_learned_fades():
    chances = Chances()
    for _ in range(50):
        chances.observe([4], num_output=0, keep=0.9)
    assert chances.by_level()[4] < 0.1
    for _ in range(50):
        chances.observe([4], num_output=1, keep=0.9)
    assert chances.by_level()[4] > 0.9


def test_drafts_that_share_forwards_end_together():
    assert not are_in_doubt([])
    assert not are_in_doubt([(1.0, Doubt(HALF.chances, least=1.0))])  # no draft ends empty
    assert are_in_doubt([(0.1, HALF), (0.4, HALF)])
    assert not are_in_doubt([(0.1, HALF), (0.6, HALF)])
    assert not are_in_doubt([(0.1, HALF), (0.1, None)]), "the other one goes on"


def drafting(doubt: Doubt | None = HALF) -> RequestState:
    state = RequestState(RequestPolicy(threshold=0.5), plan=DraftPlan(8, 1, 8, doubt=doubt))
    state.launch_draft(8)
    return state


def test_a_draft_knows_its_chance():
    state = drafting()
    state.add_draft([5, 6], 8, num_launched=2, levels=[3, SURE])
    assert (state.draft.levels, state.draft.chance) == ([3, SURE], 0.25)
    assert (state.phase, state.draft.in_doubt) == (Phase.DRAFTING, False), "the chunk decides"
    state.doubt_draft()
    assert (state.phase, state.draft.in_doubt) == (Phase.VERIFYING, True)
    assert state.notes.telemetry.stats.doubted_drafts == 1
    state.add_draft([7], 8, num_launched=1, levels=[3])
    assert state.draft.token_ids == [5, 6], "what was in flight is dropped"
    certain = drafting(doubt=None)
    certain.add_draft([5, 6], 8, num_launched=2, levels=[3, 0])
    assert (certain.draft.levels, certain.draft.chance) == ([3, 0], 1.0)


def test_an_error_that_was_foreseen_is_none_of_a_drafts_length():
    """The length by place bounds drafts that were sure; those that ended in doubt ended there."""
    found = [Acceptance(1 / 32) for _ in range(3)]
    for _ in range(40):
        found[0].observe(drafted(6, 5, [9] * 6), 24)
        found[1].observe(drafted(6, 5, [9] * 6, in_doubt=True), 24)
        found[2].observe(drafted(6, 4, [9] * 6, in_doubt=True), 24)  # the one before it
    surprised, foreseen, earlier = found
    assert foreseen.error_rate < surprised.error_rate / 4 < earlier.error_rate
    assert foreseen.expect(64)[0] < 8, "they end by themselves"


def learned(limits: Limits) -> Controller:
    """A step takes 10 ms, a draft token 2, a pass 10 and 0.1 per row; every fifth token is wrong,
    at the level that says so."""
    controller = Controller(limits)
    for _ in range(40):
        controller.observe([StageTime(Stage.DECODE, 1, 1, 10.0)], [(None, 1)])
    for length in (4, 16, 4, 16) * 20:
        draft, verify = (
            StageTime(Stage.DRAFT, 1, length, 2.0 * length),
            StageTime(Stage.VERIFY, 1 + length, 0, 10.1 + 0.1 * length),
        )
        controller.observe([draft], [(KEY, 0)])
        levels = [SURE, SURE, SURE, SURE, 1] * 4
        controller.observe_round(KEY, drafted(length, min(4, length), levels[:length]))
        controller.observe([verify], [(KEY, 5)])
    return controller


def test_a_draft_ends_where_a_token_costs_more_than_it_brings():
    controller = learned(Limits(fixed=frozenset({"max_prefixes"}), allows_doubt=True))
    plan = controller.plan(KEY)
    assert plan is not None
    assert plan.doubt is not None
    # 5 tokens took 20 to 44 ms: one is worth 2.1 ms of a token's drafting and its row.
    rate = controller.speedup / 10.0
    assert plan.doubt.least == pytest.approx(2.1 * rate, rel=0.1)
    assert plan.doubt.chances[SURE] > 0.99
    assert plan.doubt.chances[1] < 0.1
    assert plan.record()["least_chance"] == pytest.approx(plan.doubt.least, abs=1e-4)
    assert "doubt" not in plan.record()


def test_no_doubt_before_costs_are_known_and_where_drafts_may_not_end_anywhere():
    allowing = Limits(allows_doubt=True)
    first = Controller(allowing, mode="always").plan(KEY)
    assert first is not None
    assert first.doubt is None
    plan = learned(ADAPTIVE).plan(KEY)
    assert plan is not None
    assert plan.doubt is None
    assert plan.record()["least_chance"] is None


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({"verification": "token"}, True),
        ({"judge": "likelihood"}, True),
        ({"judge": "likelihood", "segment": "line"}, False),
        ({"judge": "question", "question": "default"}, False),
        ({"verification": "token", "draft_tokens": 32}, False),
        ({"verification": "token", "drafting": "always"}, False),
    ],
)
def test_where_drafts_may_end_in_doubt(settings: dict, allowed: bool):
    assert Limits.of(ParseConfig(**settings), question_rows=8).allows_doubt is allowed
