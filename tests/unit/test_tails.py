"""Texts that go on where another source's draft ends: the look ahead, and who learns what."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_parse.core.kv_demand import KvDemand, allocate_kv_slots
from sglang_parse.core.phases import EAGLE3, MODEL, PROMPT, Action, Draft, Phase, RequestPolicy
from sglang_parse.core.prompt_match import PromptMatch
from sglang_parse.core.request import RequestState
from sglang_parse.core.round import Round
from sglang_parse.core.text_match import TextMatch

pytestmark = pytest.mark.unit

DRAFT, TAIL, OTHER = [11, 12, 13], [14, 15, 16, 17], 99


def tokens(size: int, least: int = 0) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 3), min_size=least, max_size=size)


class Found:
    """What can be seen of a text's match, and all that it does next."""

    def __init__(self, match: TextMatch, answer: list[int]) -> None:
        self.seen = [match.num_seen, match.match_len, match.follows, len(match), [*match.rest(9)]]
        for start in range(0, len(answer), 3):
            match.follow(answer[start : start + 3])
            self.seen += [match.match_len, match.follows, [*match.rest(9)], match.num_searched]


@given(
    text=tokens(40, least=1),
    answer=tokens(30),
    drafts=st.lists(tokens(9, least=1), min_size=1, max_size=4),
    rest=tokens(9),
    step=st.integers(1, 9),
    kind=st.sampled_from(["prompt", "text", "growing"]),
)
@settings(max_examples=300, deadline=None)
def test_a_look_ahead_is_the_answer_itself_and_changes_nothing(
    text: list, answer: list, drafts: list, rest: list, step: int, kind: str
):
    """However often one looks: what is found behind a draft is what is found once the draft is
    output, and the text goes on as if nobody had looked."""
    match = PromptMatch(text) if kind == "prompt" else TextMatch(text)
    if kind == "growing":
        match = TextMatch.entered(text[: len(text) // 2], 0, 0, grows=True)
    for start in range(0, len(answer), step):
        match.follow(answer[start : start + step])
        match.rest(1)
    untouched = copy.deepcopy(match)
    for draft in drafts:
        written = copy.deepcopy(match)
        written.follow(draft)
        ahead = match.after(draft)
        found = [[*one.rest(9)] for one in (ahead, written)]
        assert found[0] == found[1]
        for what in ("match_len", "num_seen", "follows", "num_searched"):
            assert getattr(ahead, what) == getattr(written, what)
    if kind == "growing":
        for one in (match, untouched):
            one.extend(text[len(text) // 2 :])
    assert Found(match, rest).seen == Found(untouched, rest).seen


def tailed(accepted_len: int, num_matched: int = 0, *, judge: str | None = None) -> Round:
    """A draft of three tokens, extended by four, of which so many were output."""
    draft = Draft([*DRAFT, *TAIL], EAGLE3, judge, tail_at=3, tail_source=PROMPT)
    matched = draft.token_ids[accepted_len : accepted_len + num_matched]
    return Round(draft, accepted_len, bonus=(*matched, OTHER))


@pytest.mark.parametrize("accepted_len", range(8))
@pytest.mark.parametrize("num_matched", [0, 1, 3, 7])
def test_each_source_learns_of_its_own_part(accepted_len: int, num_matched: int):
    one = tailed(accepted_len, min(num_matched, 7 - accepted_len))
    num_output = one.num_output
    own, *tails = one.parts
    assert (own.draft.token_ids, own.draft.source) == (DRAFT, EAGLE3)
    assert own.num_output == min(3, num_output)
    assert own.tokens == one.tokens[:4]
    assert len(tails) == (num_output >= 3)
    for tail in tails:
        assert (tail.draft.token_ids, tail.draft.source) == (TAIL, PROMPT)
        assert (tail.num_output, tail.tokens) == (num_output - 3, one.tokens[3:])
    for figure in ("accepted_len", "num_matched"):
        assert sum(getattr(part, figure) for part in one.parts) == getattr(one, figure)


def test_a_draft_in_doubt_stays_one_before_its_tail():
    """How sure the draft model was is learned of its own tokens, behind a text or not."""
    draft = Draft([*DRAFT, *TAIL], levels=[1, 2, 3], in_doubt=True, tail_at=3, tail_source=PROMPT)
    own, tail = Round(draft, 5, bonus=(OTHER,)).parts
    assert (own.draft.levels, own.draft.in_doubt, own.draft.tail_source) == ([1, 2, 3], True, "")
    assert (tail.draft.levels, tail.draft.in_doubt) == ([], False)


def test_without_a_tail_a_round_is_its_only_part():
    one = Round(Draft(DRAFT, MODEL), 2, bonus=(OTHER,))
    assert one.parts == (one,)


@pytest.mark.parametrize("num_hidden", range(9))
def test_what_a_stop_hides_is_taken_from_the_tail_first(num_hidden: int):
    state = RequestState(RequestPolicy(0.5))
    one = tailed(4, 2)  # three of the head's, three of the text's, and the target's own
    state.count_round(one)
    counts = {name: vars_of(stats) for name, stats in state.notes.telemetry.sources.items()}
    assert counts == {EAGLE3: (1, 3, 0), PROMPT: (0, 1, 2)}
    assert vars_of(state.notes.telemetry.stats) == (1, 4, 2)
    hidden = {name: own for name, *own in state.notes.telemetry.last_by_source(num_hidden)}
    by_count = [OTHER, "matched", "matched", "accepted", "own", "own", "own"][:num_hidden]
    wanted = [by_count.count("accepted"), by_count.count("matched")]
    assert hidden == {PROMPT: wanted, EAGLE3: [by_count.count("own"), 0]}


def vars_of(stats: object) -> tuple:
    return tuple(getattr(stats, name) for name in ("rounds", "accepted_tokens", "matched_tokens"))


def test_a_failed_draft_is_one_whatever_extends_it():
    state = RequestState(RequestPolicy(0.5))
    draft = Draft([*DRAFT, *TAIL], MODEL, tail_at=3, tail_source=PROMPT)
    state.count_round(Round(draft, 0, bonus=(OTHER,)))
    assert state.num_failed == 1
    state.count_round(Round(draft, 7, bonus=(OTHER,)))
    assert state.num_failed == 0


def proposing(room: int) -> KvDemand:
    return KvDemand(Phase.DECODING, 20, 20, 4 + room, proposes=True, room=room)


@pytest.mark.parametrize(
    ("available", "action", "slots"),
    [(72, Action.PROPOSE, 36), (71, Action.PROPOSE, 4), (8, Action.PROPOSE, 4)]
    + [(7, Action.DECODE, 1)],
)
def test_short_of_slots_no_text_extends_a_proposal_before_none_is_made(
    available: int, action: Action, slots: int
):
    grants = allocate_kv_slots([proposing(32), proposing(32)], available)
    assert {(grant.action, grant.lookahead_slots) for grant in grants} == {(action, slots)}
