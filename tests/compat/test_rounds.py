"""What a judged draft leaves: what is kept, who decided, what the next one begins with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.counters import Counters
from sglang_parse.core.phases import Outcome, Phase, Questions, RequestPolicy
from sglang_parse.core.policy.controller import Controller
from sglang_parse.core.question import Question
from sglang_parse.core.request import Draft, RequestState
from sglang_parse.core.simulation import ENV_VAR as SIMULATION
from sglang_parse.engine.readout import Readout
from sglang_parse.engine.rounds import Rounds
from sglang_parse.engine.rows import verifying_rows

pytestmark = pytest.mark.compat

OUTPUT = [1, 2]
QUESTION = Question(partial_ids=(90, 91), complete_ids=(90, 92), accept_id=8, reject_id=9)
NOT_THE_DRAFTS, STOP = 77, 0


class Tokens:
    """A tokenizer whose every token is a word."""

    def decode(self, ids: list[int]) -> str:
        return " word" * len(ids)


class Round:
    """A request whose draft is over, as it goes through one server's ``Rounds``."""

    def __init__(
        self, draft: list[int], *, finished: bool = False, limit: int = 1000, **settings: Any
    ) -> None:
        config = ParseConfig(**{"segment": "tokens:2"} | settings)
        self.rounds = Rounds(config, Tokens(), QUESTION, Controller(mode="always"), Counters())
        self.state = RequestState(
            RequestPolicy(threshold=0.5, keep_trace=True, stop_ids=frozenset({STOP})),
            phase=Phase.VERIFYING,
            draft=Draft(list(draft), finished=finished),
            output_ids=list(OUTPUT),
            committed=20,
            draft_kv_len=20 + len(draft),
        )
        self.req = SimpleNamespace(
            parse_state=self.state,
            origin_input_ids=list(range(100, 119)),
            sampling_params=SimpleNamespace(max_new_tokens=len(OUTPUT) + limit),
        )

    def ask(self) -> Questions:
        questions = self.rounds.questions(self.req)
        assert questions is not None
        self.state.ask(questions)
        return questions

    def judge(self, verdicts: list[float], own: int = NOT_THE_DRAFTS) -> Outcome:
        """The target's verdicts, and the token it would write itself, wherever that is."""
        self.ask()
        return self.decide(verdicts, [own] * (1 + self.state.draft.num_judged))

    def agree(self, verdicts: list[float], but_at: int | None = None) -> Outcome:
        """The target's verdicts; it would itself write what the draft has, but for one place."""
        self.ask()
        ids = self.state.draft.token_ids
        choices = [*ids, NOT_THE_DRAFTS][: 1 + self.state.draft.num_judged]
        if but_at is not None:
            choices[but_at] = NOT_THE_DRAFTS
        return self.decide(verdicts, choices)

    def decide(self, verdicts: list[float], choices: list[int]) -> Outcome:
        part = verifying_rows(0, self.req, semantic=True)
        assert part.cut_rows == tuple(range(len(choices)))
        readout = Readout(choices, verdicts, [1.0] * len(verdicts), is_faulty=False)
        return self._write(self.rounds.judged(self.req, readout))

    def step(self, choices: list[int], proposed: list[int]) -> Outcome:
        """The target's own tokens, one behind every token that an EAGLE-3 head proposed."""
        readout = Readout(choices, [], [], is_faulty=False)
        return self._write(self.rounds.checked(self.req, proposed, readout))

    def _write(self, outcome: Outcome) -> Outcome:
        self.state.apply(outcome)
        self.state.write(outcome.token_ids)
        return outcome


# -- who decides ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selection", "finished", "accepted_len", "decided_by"),
    [
        ("first-reject", True, 2, 1),
        ("answer-first", True, 6, 2),
        ("answer-first", False, 2, 1),  # no question was about the answer
        ("longest", True, 6, 2),
    ],
)
def test_the_trace_says_which_question_decided(
    selection: str, finished: bool, accepted_len: int, decided_by: int
):
    one = Round([11, 12, 13, 14, 15, 16], finished=finished, selection=selection)
    outcome = one.judge([0.9, 0.1, 0.9])
    assert outcome.round is not None
    assert outcome.round.accepted_len == accepted_len
    (record,) = one.state.trace
    assert (record["accepted_len"], record["decided_by"]) == (accepted_len, decided_by)


# -- drafts that the length limit ends --------------------------------------------------


@pytest.mark.parametrize(("limit", "ends"), [(5, [2, 4, 5]), (6, [2, 4])])
def test_a_draft_that_the_limit_ends_is_judged_to_its_last_token(limit: int, ends: list[int]):
    one = Round([11, 12, 13, 14, 15], limit=limit)
    questions = one.ask()
    assert questions.prefix_ends == ends
    assert set(questions.question_ids) == {QUESTION.partial_ids}  # unfinished, all of them


def test_a_draft_that_the_limit_ends_and_all_of_which_is_kept_ends_the_answer():
    one = Round([11, 12, 13, 14, 15], limit=5)
    outcome = one.judge([0.9] * 3)
    assert (outcome.token_ids, outcome.num_own) == ((11, 12, 13, 14, 15), 0)


# -- what the target would have written as well ------------------------------------------


def test_behind_a_cut_comes_what_the_target_would_have_written_as_the_draft_has_it():
    one = Round([11, 12, 13, 14, 15, 16])
    outcome = one.agree([0.9, 0.1, 0.1], but_at=4)
    assert outcome.token_ids == (11, 12, 13, 14, NOT_THE_DRAFTS)
    assert outcome.num_own == 3
    state = one.state
    assert (state.stats.accepted_tokens, state.stats.matched_tokens) == (2, 2)
    # Of all but the token that is new the draft model has written the KV.
    assert (state.committed, state.draft_kv_len) == (25, 25)
    (record,) = state.trace
    assert (record["accepted_len"], record["next_token_id"]) == (2, 13)
    assert record["bonus_token_ids"] == [13, 14, NOT_THE_DRAFTS]
    assert record["target_token_ids"] == [11, 12, 13, 14, NOT_THE_DRAFTS, 16, NOT_THE_DRAFTS]


@pytest.mark.parametrize(("but_at", "phase"), [(1, Phase.DECODING), (2, Phase.DRAFTING)])
def test_drafting_resumes_where_it_ends_the_segment(but_at: int, phase: Phase):
    one = Round([11, 12, 13, 14, 15, 16], segment="tokens:3")
    one.agree([0.1, 0.1], but_at=but_at)
    assert one.state.phase is phase


def test_a_step_of_many_tokens_is_output_whole_and_drafting_resumes_behind_it(
    monkeypatch: pytest.MonkeyPatch,
):
    """What an EAGLE-3 head's pass wrote behind the end of the target's segment is the target's."""
    told: list[tuple[float, int]] = []
    monkeypatch.setattr(Controller, "observe_decoded_segment", lambda _, *what: told.append(what))
    one = Round([11, 12, 13, 14, 15, 16], segment="tokens:3")
    one.judge([0.1, 0.1])
    assert one.state.phase is Phase.DECODING
    outcome = one.step([21, 22, 23, 24], proposed=[21, 22, 23])
    assert outcome.token_ids == (21, 22, 23, 24)
    assert (one.state.phase, outcome.eagle3_steps) == (Phase.DRAFTING, 1)
    # The segment it rewrote (one token came with the pass), not what came beyond.
    assert told == [(0.5, 3)]
    assert one.state.num_stepped == 2


def test_a_step_ends_with_the_answer():
    one = Round([11, 12, 13, 14, 15, 16], segment="tokens:3")
    one.judge([0.1, 0.1])
    outcome = one.step([21, STOP, 23, 24], proposed=[21, STOP, 23])
    assert outcome.token_ids == (21, STOP)


def test_a_rejected_draft_that_the_target_would_have_written_is_output_whole():
    """Its unjudged end, too, is where the next one begins."""
    one = Round([11, 12, 13, 14, 15, 16, 17, 18], segment="tokens:5")
    outcome = one.agree([0.1])
    assert outcome.token_ids == (11, 12, 13, 14, 15, 16)
    state = one.state
    assert state.stats.accepted_tokens == 0
    assert (state.phase, state.draft) == (Phase.DRAFTING, Draft([17, 18]))
    assert (state.committed, state.draft_kv_len) == (26, 28)


def test_the_targets_own_end_of_the_answer_ends_it():
    one = Round([11, 12, 13, STOP], finished=True)
    assert one.agree([0.1, 0.1]).token_ids == (11, 12, 13, STOP)
    other = Round([11, 12, 13, 14])
    assert other.judge([0.1, 0.1], own=STOP).token_ids == (STOP,)


@pytest.mark.parametrize(("limit", "output"), [(4, 4), (5, 5)])
def test_no_more_comes_than_the_limit_allows(limit: int, output: int):
    one = Round([11, 12, 13, 14], limit=limit)
    outcome = one.agree([0.1, 0.1])
    assert len(outcome.token_ids) == outcome.num_own == output


def test_a_simulated_share_is_all_that_comes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(SIMULATION, "0.5")
    one = Round([11, 12, 13, 14])
    assert one.agree([0.1, 0.1]).token_ids == (11, 12, 13)


# -- drafts that the budget ends --------------------------------------------------------


def test_the_next_draft_begins_with_the_end_that_nobody_judged():
    """Nothing moves: its tokens and the draft model's KV stay at their places."""
    one = Round([11, 12, 13, 14, 15, 16, 17, 18], segment="tokens:5")
    outcome = one.judge([0.9], own=16)
    assert outcome.token_ids == (11, 12, 13, 14, 15, 16)
    state = one.state
    assert (state.phase, state.draft) == (Phase.DRAFTING, Draft([17, 18]))
    assert (state.committed, state.draft_kv_len) == (26, 28)
    assert state.draft_kv_len == state.committed + state.num_drafted
    state.launch_draft(1)
    state.add_draft([19], 8, num_launched=1)
    assert state.draft_kv_len == state.committed + state.num_drafted
    assert state.stats.drafted_tokens == 1  # what was drafted before counts once


@pytest.mark.parametrize(
    ("verdict", "own", "why"),
    [
        (0.9, NOT_THE_DRAFTS, "the target goes on differently"),
        (0.1, 11, "the judged part is rejected"),
    ],
)
def test_the_end_that_nobody_judged_is_dropped(verdict: float, own: int, why: str):
    one = Round([11, 12, 13, 14, 15, 16, 17, 18], segment="tokens:5")
    one.judge([verdict], own)
    assert one.state.draft == Draft(), why
    assert one.state.draft_kv_len <= one.state.committed


def test_no_draft_no_tail():
    """The target writes to the end: what it writes need not be what the tail says."""
    one = Round([11, 12, 13, 14, 15, 16, 17, 18], segment="tokens:5")
    one.rounds.controller.mode = "never"
    one.judge([0.9], own=16)
    assert (one.state.phase, one.state.draft) == (Phase.DECODING, Draft())
    assert one.state.draft_kv_len <= one.state.committed
