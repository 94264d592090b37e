"""Committing a verify result: accepted tokens, the rule that decided, and the next draft."""

from __future__ import annotations

import json
import logging
import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_parse.core import request_telemetry
from sglang_parse.core.block import NO_TOKEN
from sglang_parse.core.config import ParseConfig
from sglang_parse.core.phases import (
    ANSWERS,
    EAGLE3,
    Action,
    Draft,
    Phase,
    RequestPolicy,
)
from sglang_parse.core.policy.constants import DEFAULTS
from sglang_parse.core.policy.controller import Controller
from sglang_parse.core.question import Question
from sglang_parse.core.request import RequestState
from sglang_parse.core.rival import WINDOW as RIVAL_WINDOW
from sglang_parse.core.round import Round, Verdicts
from sglang_parse.core.segment import Segmenter
from sglang_parse.core.simulation import ENV_VAR as SIMULATION
from sglang_parse.core.simulation import SimulatedAcceptance, place_of
from sglang_parse.core.stage import Stage, StageTime
from sglang_parse.engine import commit as commit_module
from sglang_parse.engine import verify as verify_module
from sglang_parse.engine.faults import NO_LOGIT, NO_LOGITS
from sglang_parse.engine.forward import step_rows, verify_rows
from sglang_parse.engine.judge.judge import WINDOW
from sglang_parse.engine.judge.scorer import CapturedLayers, Scorer
from sglang_parse.engine.row_results import RowResults
from sglang_parse.engine.sources.eagle import EagleSource
from sglang_parse.engine.trace import trace_record
from sglang_parse.engine.verify import TargetForward, TargetResult
from support.engine_parts import engine_parts
from support.rounds import round_of
from support.watched import Watched

pytestmark = pytest.mark.compat

OUTPUT = [1, 2]
QUESTION = Question(partial_ids=(90, 91), complete_ids=(90, 92), accept_id=8, reject_id=9)
NOT_THE_DRAFTS, STOP = 77, 0


def rejected(values: list[float]) -> Round:
    """Of which the target would have written every token itself."""
    draft, verdicts = Draft([11, 12], prefix_ends=[2]), Verdicts(values, [1.0])
    return Round(draft, verdicts=verdicts, rule="first-reject", target_tokens=[11, 12])


def commit(one: Served, result: TargetResult) -> list[int]:
    accepted = one.committer.accept(one.req, result)
    one.committer.move_on(one.req, accepted)
    return [*accepted.tokens]


class Tokens:
    """A tokenizer whose every token is a word."""

    def decode(self, ids: list[int]) -> str:
        return " word" * len(ids)


class Served:
    """A request with a complete draft, and the committer of a server."""

    def __init__(
        self, draft: list[int], *, finished: bool = False, limit: int = 1000, **settings: Any
    ) -> None:
        config = ParseConfig(**{"segment": "tokens:2", "threshold": 0.5} | settings)
        has_head = config.proposer and config.scores_tokens
        eagle = HEADS["graph"] if config.proposer else None
        parts = engine_parts(
            config,
            Controller(mode="always"),
            question=QUESTION,
            scorer=Scorer.likelihood("cpu") if has_head else None,
            tokenizer=Tokens(),
            drafter=object() if eagle is None else None,
            head=eagle,
        )
        self.controller, self.verdicts = parts.controller, parts.judge
        self.committer = parts.committer
        self.state = RequestState(
            RequestPolicy(0.5, config.judge_name, keep_trace=True, stop_ids=frozenset({STOP})),
            phase=Phase.VERIFYING,
            draft=Draft(list(draft), judge=config.judge_name, finished=finished),
            output_ids=list(OUTPUT),
            committed=20,
            draft_kv_len=20 + len(draft),
        )
        self.req = SimpleNamespace(
            parse_state=self.state,
            origin_input_ids=list(range(100, 119)),
            sampling_params=SimpleNamespace(max_new_tokens=len(OUTPUT) + limit, top_k=1),
            grammar=None,
            return_logprob=False,
            kv=SimpleNamespace(kv_allocated_len=1000),
            parse_incoming={},
        )

    def ask(self) -> Draft:
        self.verdicts.ask(self.req)
        assert self.state.draft.prefix_ends
        return self.state.draft

    def judge(self, verdicts: list[float], choice: int = NOT_THE_DRAFTS) -> list[int]:
        """Commits these verdicts, with the same target choice everywhere."""
        self.ask()
        return self.commit(verdicts, [choice] * (1 + self.state.draft.num_verified))

    def agree(self, verdicts: list[float], but_at: int | None = None) -> list[int]:
        """Commits these verdicts; the target's choices equal the draft, but for one position."""
        self.ask()
        ids = self.state.draft.token_ids
        choices = [*ids, NOT_THE_DRAFTS][: 1 + self.state.draft.num_verified]
        if but_at is not None:
            choices[but_at] = NOT_THE_DRAFTS
        return self.commit(verdicts, choices)

    def commit(self, verdicts: list[float], choices: list[int]) -> list[int]:
        part = verify_rows(0, self.req)
        assert part.token_rows == tuple(range(len(choices)))
        answers = [(verdict, 1.0) for verdict in verdicts]
        return commit(self, TargetResult(part, choices, answers=answers))

    def propose(
        self, proposed: list[int], choices: list[int], scores: list[list[float]] = ()
    ) -> list[int]:
        """Commits what a forward said about a head's proposal."""
        self.state.action = Action.PROPOSE
        self.committer.take_proposals([self.req], [proposed])
        part = verify_rows(0, self.req)
        count = part.num_token_rows
        return commit(self, TargetResult(part, choices[:count], [TAKES, *scores][:count]))

    def decode(self) -> list[int]:
        return commit(self, TargetResult(step_rows(0), [NOT_THE_DRAFTS]))


# -- who decides ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selection", "finished", "accepted_len", "decided_by"),
    [
        ("first-reject", True, 2, 1),
        ("answer-first", True, 6, 2),
        ("answer-first", False, 2, 1),  # no question was about the answer
    ],
)
def test_the_trace_says_which_question_decided(
    selection: str, finished: bool, accepted_len: int, decided_by: int
):
    one = Served([11, 12, 13, 14, 15, 16], finished=finished, selection=selection)
    one.judge([0.9, 0.1, 0.9])
    assert one.state.notes.telemetry.stats.accepted_tokens == accepted_len
    (record,) = one.state.notes.telemetry.trace
    assert (record["accepted_len"], record["decided_by"]) == (accepted_len, decided_by)


def test_a_request_without_a_judge_is_compared_token_by_token():
    """On a server that has one; drafting resumes at once, not at the end of a segment."""
    one = Served([11, 12, 13, 14, 15, 16])
    one.state.policy = replace(one.state.policy, judge=None)
    one.state.give_draft(one.state.draft.token_ids, 4)
    one.committer.ask(one.req)
    assert not one.state.draft.prefix_ends
    assert one.commit([], [11, 12, 13, 77, 15, 16, 17]) == [11, 12, 13, 77]
    assert (one.state.notes.telemetry.stats.accepted_tokens, one.state.phase) == (3, Phase.DRAFTING)
    (record,) = one.state.notes.telemetry.trace
    assert (record["judge"], record["verdicts"]) == (None, [])


@pytest.mark.parametrize(("name", "refused"), [("numbers", 1), ("code", 0)])
def test_a_strict_token_ends_the_accepted_prefix(
    name: str, refused: int, monkeypatch: pytest.MonkeyPatch
):
    """Whatever its verdict: the trace, the answer's figures and the metrics say which."""
    one = Served([11, 12, 13, 14, 15, 16])
    one.state.policy = replace(one.state.policy, threshold=0.0, strict=(name,))
    monkeypatch.setattr(Segmenter, "text_of", lambda _, token, __: {14: "7"}.get(token, " word"))
    one.agree([0.9, 0.9, 0.9], but_at=3)
    accepted_len = 2 if refused else 6
    assert one.state.notes.telemetry.stats.accepted_tokens == accepted_len
    assert one.state.notes.telemetry.strict_refusals == ({name: 1} if refused else {})
    assert one.verdicts.counters.totals["strict_refusals_total", name] == refused
    (record,) = one.state.notes.telemetry.trace
    assert record["accepted_len"] == accepted_len
    assert record["strict"] == ({"place": 3, "name": name} if refused else None)


# -- drafts that the length limit ends --------------------------------------------------


@pytest.mark.parametrize(("limit", "ends"), [(5, [2, 4, 5]), (6, [2, 4])])
def test_a_draft_that_the_limit_ends_is_judged_to_its_last_token(limit: int, ends: list[int]):
    one = Served([11, 12, 13, 14, 15], limit=limit)
    draft = one.ask()
    assert draft.prefix_ends == ends
    assert set(draft.question_ids) == {QUESTION.partial_ids}  # unfinished, all of them


def test_a_draft_that_the_limit_ends_and_all_of_which_is_kept_ends_the_answer():
    one = Served([11, 12, 13, 14, 15], limit=5)
    assert one.judge([0.9] * 3) == [11, 12, 13, 14, 15]
    assert one.state.notes.telemetry.num_target_run == 0


# -- candidates behind a draft ------------------------------------------------------------


def with_candidates(*candidates: int, **settings: Any) -> Served:
    """The last block of a draft of four tokens has proposed these behind it."""
    one = Served([11, 12, 13, 14], **settings)
    one.state.draft.candidates = candidates
    one.committer.ask(one.req)
    return one


def counts_of(one: Served) -> tuple[int, int, int]:
    stats = one.state.notes.telemetry.stats
    return stats.rounds, stats.accepted_tokens, stats.matched_tokens


def test_behind_an_accepted_draft_come_the_candidates_that_the_target_chooses():
    """Their verdict is the target's own choice; they are no draft tokens."""
    one = with_candidates(15, 16, 17)
    assert one.commit([0.9, 0.9], [99, 99, 99, 99, 15, 16, 18, 19]) == [11, 12, 13, 14, 15, 16, 18]
    assert counts_of(one) == (1, 4, 0)
    (record,) = one.state.notes.telemetry.trace
    assert record["candidate_token_ids"] == [15, 16, 17]
    assert (record["accepted_len"], record["bonus_token_ids"]) == (4, [15, 16, 18])
    assert record["target_token_ids"] == [99, 99, 99, 99, 15]
    # The draft model continues behind them; it lacks KV of what it did not confirm.
    state = one.state
    assert (state.phase, state.committed, state.draft_kv_len) == (Phase.DRAFTING, 27, 24)


@pytest.mark.parametrize(
    ("verdicts", "choices", "output"),
    [
        ([0.9, 0.1], [11, 12, 99, 14, 15, 16], [11, 12, 99]),
        # What a judge refuses and the target chooses is output, and so is what follows.
        ([0.9, 0.1], [11, 12, 13, 14, 15, 16], [11, 12, 13, 14, 15, 16]),
        ([0.9, 0.9], [99, 99, 99, 99, 99, 16], [11, 12, 13, 14, 99]),
    ],
)
def test_candidates_behind_a_refusal_are_none(verdicts: list, choices: list, output: list):
    assert with_candidates(15).commit(verdicts, choices) == output


@pytest.mark.parametrize("verification", ["token", "semantic"])
def test_candidates_are_exact_where_drafts_are(verification: str):
    one = with_candidates(15, 16)
    judge = None if verification == "token" else one.state.policy.judge
    one.state.policy = replace(one.state.policy, judge=judge, threshold=1.5)
    one.state.draft = Draft([11, 12, 13, 14], judge=judge, candidates=(15, 16))
    one.committer.ask(one.req)
    verdicts = [0.9, 0.9] if judge else []
    assert one.commit(verdicts, [11, 12, 13, 14, 15, 77, 1]) == [11, 12, 13, 14, 15, 77]


@pytest.mark.parametrize(
    ("change", "num_left"),
    [
        ({}, 3),
        ({"limit": 6}, 1),
        ({"limit": 5}, 0),  # the target's own token completes the answer
        ({"candidates": (15, STOP, 17)}, 1),
        ({"draft": [11, 12, 13]}, 0),  # the next draft begins with the third
        ({"is_truncated": True}, 0),
        ({"pays": False}, 0),
        ({"compares": False}, 0),
    ],
    ids=str,
)
def test_which_candidates_a_pass_compares(change: dict, num_left: int, monkeypatch: Any):
    one = Served(change.get("draft", [11, 12, 13, 14]), limit=change.get("limit", 1000))
    draft = one.state.draft
    draft.candidates = change.get("candidates", (15, 16, 17))
    draft.is_truncated = change.get("is_truncated", False)
    monkeypatch.setattr(
        type(one.committer.sources), "candidates_pay", lambda *_: change.get("pays", True)
    )
    one.committer.compares_candidates = change.get("compares", True)
    one.committer.ask(one.req)
    assert len(draft.candidates) == num_left
    num_rows = 1 + draft.num_verified + num_left
    assert draft.num_rows == num_rows + len(draft.question_ids) * 2
    assert verify_rows(0, one.req).num_token_rows == num_rows


def test_candidates_that_bring_less_than_their_rows_cost_wait_for_better_times():
    """They are tried again at every 64th draft."""
    one = Served([11, 12, 13, 14])
    (source,) = (x for x in one.committer.sources._sources if x.name == "model")
    one.controller.mode = "auto"
    for stage, size, ms in ((Stage.DECODE, 1, 10), (Stage.VERIFY, 5, 10), (Stage.VERIFY, 10, 20)):
        for _ in range(3):
            one.controller.observe([StageTime(stage, size, 1, ms=ms)], [(None, 1)])
    draft = Draft([11], candidates=(12, 13, 14, 15, 16))
    pays = []
    for _ in range(64):
        pays.append(source.candidates_pay(one.req, 5))
        source.observe(one.req, Round(draft, 1, bonus=(99,)))  # no candidate fits
    pays.append(source.candidates_pay(one.req, 5))
    assert pays == [True, *[False] * 63, True]
    for _ in range(64):
        source.observe(one.req, Round(draft, 1, bonus=(12, 13, 14, 15, 99)))
    source.observe(one.req, Round(draft, 1, bonus=(12, 13, 14, 15, 99)))
    assert source.candidates_pay(one.req, 5)


# -- what the target would have written as well ------------------------------------------


def test_behind_a_cut_comes_what_the_target_would_have_written_as_the_draft_has_it():
    one = Served([11, 12, 13, 14, 15, 16])
    assert one.agree([0.9, 0.1, 0.1], but_at=4) == [11, 12, 13, 14, NOT_THE_DRAFTS]
    state = one.state
    assert state.notes.telemetry.num_target_run == 3
    assert (
        state.notes.telemetry.stats.accepted_tokens,
        state.notes.telemetry.stats.matched_tokens,
    ) == (2, 2)
    # Of all but the token that is new the draft model has written the KV.
    assert (state.committed, state.draft_kv_len) == (25, 25)
    (record,) = state.notes.telemetry.trace
    assert (record["accepted_len"], record["next_token_id"]) == (2, 13)
    assert record["bonus_token_ids"] == [13, 14, NOT_THE_DRAFTS]
    assert record["target_token_ids"] == [11, 12, 13, 14, NOT_THE_DRAFTS, 16, NOT_THE_DRAFTS]


@pytest.mark.parametrize("segment", ["tokens:1", "tokens:3"])
@pytest.mark.parametrize("but_at", [0, 1, 2])
def test_a_refusal_costs_the_target_no_decode_step(segment: str, but_at: int):
    """The pass's own token is output, and drafting resumes behind it, wherever segments end."""
    one = Served([11, 12, 13, 14, 15, 16], segment=segment)
    count = 6 if segment == "tokens:1" else 2
    assert one.agree([0.1] * count, but_at=but_at) == [*(11, 12)[:but_at], NOT_THE_DRAFTS]
    assert (one.state.phase, one.state.num_decoded) == (Phase.DRAFTING, 0)
    assert one.state.notes.telemetry.stats.skipped_drafts == 0


def test_a_skipped_draft_is_asked_for_again_at_the_next_token():
    one = Served([11, 12, 13, 14])
    one.controller.mode = "never"
    one.judge([0.9, 0.1])
    assert (one.state.phase, one.state.notes.telemetry.stats.skipped_drafts) == (Phase.DECODING, 1)
    one.controller.mode = "always"
    one.decode()
    assert (one.state.phase, one.state.num_decoded) == (Phase.DRAFTING, 1)


def test_a_step_of_many_tokens_is_output_whole_and_drafting_resumes_behind_it():
    """An EAGLE-3 head's, while drafting is suspended."""
    one = Served([11, 12, 13, 14])
    one.state.policy = replace(one.state.policy, proposer=EAGLE3)
    one.controller.mode = "never"
    one.judge([0.1, 0.1])
    one.controller.mode = "always"
    assert one.propose([21, 22, 23], [21, 22, 23, 24]) == [21, 22, 23, 24]
    assert (one.state.phase, one.state.notes.telemetry.sources[EAGLE3].rounds) == (
        Phase.DRAFTING,
        1,
    )
    assert one.state.num_decoded == 4


# -- an EAGLE-3 head's drafts -----------------------------------------------------------

TAKES = [0.0, 0.0, -0.1, 0.0]
REFUSES = [-9.0, 0.0, -9.0, 0.0]
"""Scores of a token, and its log-probability and entropy."""


class Chain(Served):
    """A request that the EAGLE-3 head drafts for, without a draft model."""

    def __init__(self, **settings: Any) -> None:
        super().__init__([], segment="tokens:1", eagle3_path="head", **settings)
        self.state.policy = replace(self.state.policy, proposer="eagle3")
        self.committer._resume_drafting(self.req)


def test_a_proposal_is_a_draft_and_the_next_one_follows():
    one = Chain(judge="likelihood")
    assert one.propose([11, 12, 13], [21, 22, 23, 24], [TAKES, TAKES, REFUSES]) == [11, 12, 23]
    assert one.propose([11, 12, 13], [21, 22, 23, 24], [TAKES] * 3) == [11, 12, 13, 24]
    found = one.state.notes.telemetry.sources[EAGLE3]
    assert (found.rounds, found.drafted_tokens, found.accepted_tokens) == (2, 6, 5)
    assert [record["source"] for record in one.state.notes.telemetry.trace] == [EAGLE3, EAGLE3]
    stats = one.state.notes.telemetry.stats
    assert (stats.skipped_drafts, one.state.num_decoded) == (0, 7)


@pytest.mark.parametrize("exact", [{"verification": "token"}, {"judge": "likelihood"}], ids=str)
def test_in_exact_modes_a_proposal_is_what_the_target_chose(exact: dict):
    one = Chain(**exact)
    if "judge" in exact:
        one.state.policy = replace(one.state.policy, threshold=1.5)
    assert one.propose([11, 12, 13], [11, 22, 13, 24], [TAKES] * 3) == [11, 22]
    assert one.propose([], [31]) == [31]


def test_the_target_chooses_the_answers_end_itself():
    """A stop token is no draft token, whatever its likelihood."""
    one = Chain(judge="likelihood")
    assert one.propose([11, STOP, 13], [11, 22, 13, 24], [TAKES] * 3) == [11, 22]
    assert one.propose([11, STOP, 13], [11, STOP, 13, 24], [TAKES] * 3) == [11, STOP]
    assert (one.state.phase, one.state.draft) == (Phase.DECODING, Draft())


STEP_MS = 8.0
HEADS = {
    "graph": SimpleNamespace(num_steps=3, steps_for=lambda _: 3),
    "pieces": SimpleNamespace(num_steps=3, steps_for=lambda length: length),
}
"""Heads that run all their steps, or as many as they propose tokens."""


def heads_controller(*, per_row: float) -> Controller:
    """After steps of chains of three, and of single tokens, at several loads."""
    controller = Controller()
    for size in (1, 2, 4, 8, 16):
        controller.num_running, rows = size, 4 * size
        for _ in range(8 * DEFAULTS.cold_forwards):
            ms = STEP_MS + per_row * rows
            step = StageTime(Stage.DECODE, size, 2 * size, ms + 1, 3, num_rows=rows, head_ms=1.0)
            last = StageTime(Stage.DECODE, size, size, STEP_MS + per_row * size, num_rows=size)
            controller.observe([step], [(None, 2)] * size)
            controller.observe([last], [(None, 1)] * size)
    return controller


@pytest.mark.parametrize(
    ("head", "accepted", "per_row", "length"),
    [
        ("graph", 3, 0.5, 3),
        ("graph", 0, 0.5, 1),
        ("graph", 3, 0.0, 3),
        ("pieces", 3, 0.0, 3),
        ("pieces", 0, 0.0, 1),
    ],
)
def test_a_proposal_is_as_long_as_its_rows_and_steps_pay(
    head: str, accepted: int, per_row: float, length: int
):
    outcome = round_of(3, 3, accepted)
    timed = heads_controller(per_row=per_row)
    untimed = Controller(), Controller(mode="always")
    for controller, wanted in ((timed, length), *((one, 3) for one in untimed)):
        source = EagleSource(ParseConfig(), controller, HEADS[head])
        for _ in range(100):
            source.observe(None, outcome)
        for controller.num_running in (1, 16):
            assert source.length() == wanted


def test_all_requests_of_a_pass_propose_alike(monkeypatch: pytest.MonkeyPatch):
    """Their length is chosen once, however many there are, and anew behind the next pass."""
    controller, asked = heads_controller(per_row=0.5), list[int]()
    source = EagleSource(ParseConfig(), controller, HEADS["pieces"])
    expect = source._acceptance.expect
    monkeypatch.setattr(
        source._acceptance, "expect", lambda length: asked.append(length) or expect(length)
    )
    for accepted in (3, 0):
        for _ in range(100):
            source.observe(None, round_of(3, 3, accepted))
        lengths = {source.length() for _ in range(64)}
        assert lengths == {max(1, accepted)}
    assert sorted(asked) == [1, 1, 2, 2, 3, 3]


def test_a_head_that_does_not_run_for_a_request_drafts_nothing():
    one = Chain(judge="likelihood")
    one.state.policy = replace(one.state.policy, proposer="none")
    one.propose([11], [11, 12], [TAKES])
    assert one.state.draft.source != EAGLE3
    assert one.state.no_draft_reason == "eagle3: the head does not run for this request"


def test_a_rejected_draft_that_the_target_would_have_written_is_output_whole():
    """Its unjudged end, too, is where the next one begins."""
    one = Served([11, 12, 13, 14, 15, 16, 17, 18], segment="tokens:5")
    assert one.agree([0.1]) == [11, 12, 13, 14, 15, 16]
    state = one.state
    assert state.notes.telemetry.stats.accepted_tokens == 0
    assert (state.phase, state.draft) == (Phase.DRAFTING, Draft([17, 18], judge="likelihood"))
    assert (state.committed, state.draft_kv_len) == (26, 28)


def test_the_targets_own_end_of_the_answer_ends_it():
    one = Served([11, 12, 13, STOP], finished=True)
    assert one.agree([0.1, 0.1]) == [11, 12, 13, STOP]
    other = Served([11, 12, 13, 14], segment="tokens:1")
    assert other.judge([0.1] * 4, choice=STOP) == [STOP]
    assert one.state.phase is other.state.phase is Phase.DECODING  # nothing drafts after it


@pytest.mark.parametrize(("limit", "output"), [(4, 4), (5, 5)])
def test_no_more_comes_than_the_limit_allows(limit: int, output: int):
    one = Served([11, 12, 13, 14], limit=limit)
    tokens = one.agree([0.1, 0.1])
    assert len(tokens) == one.state.notes.telemetry.num_target_run == output


def test_a_simulated_share_is_all_that_comes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(SIMULATION, "0.5")
    one = Served([11, 12, 13, 14])
    assert one.agree([0.1, 0.1]) == [11, 12, 13]


def test_simulated_refusals_follow_the_text(monkeypatch: pytest.MonkeyPatch):
    """Another draft of the same text is refused at the same place."""
    monkeypatch.setenv(SIMULATION, "every:4")
    place = place_of(range(100, 119), len(OUTPUT))
    found = SimulatedAcceptance.refusals(4)
    refused = [found.accepted_len(1, [1], place + at) == 0 for at in range(16)]
    first = refused.index(True)
    assert first < 15
    for length in (15, 16):
        one = Served([*range(11, 11 + length)], segment="tokens:1", max_prefixes=16)
        assert len(one.agree([0.1] * length)) == first + 1


# -- drafts that the budget ends --------------------------------------------------------


def test_the_next_draft_begins_with_the_end_that_nobody_judged():
    """Nothing moves: its tokens and the draft model's KV stay at their places."""
    one = Served([11, 12, 13, 14, 15, 16, 17, 18], segment="tokens:5")
    assert one.judge([0.9], choice=16) == [11, 12, 13, 14, 15, 16]
    state = one.state
    assert (state.phase, state.draft) == (Phase.DRAFTING, Draft([17, 18], judge="likelihood"))
    assert (state.committed, state.draft_kv_len) == (26, 28)
    assert state.draft_kv_len == state.committed + state.num_drafted
    state.launch_draft(1)
    state.add_draft([19], 8, num_launched=1, levels=[0])
    assert state.draft_kv_len == state.committed + state.num_drafted
    assert state.notes.telemetry.stats.drafted_tokens == 1  # what was drafted before counts once


@pytest.mark.parametrize(
    ("verdict", "choice", "why"),
    [
        (0.9, NOT_THE_DRAFTS, "the target goes on differently"),
        (0.1, 11, "the judged part is rejected"),
    ],
)
def test_the_end_that_nobody_judged_is_dropped(verdict: float, choice: int, why: str):
    one = Served([11, 12, 13, 14, 15, 16, 17, 18], segment="tokens:5")
    one.judge([verdict], choice)
    assert one.state.draft == Draft(judge="likelihood"), why
    assert one.state.draft_kv_len <= one.state.committed


def test_no_draft_no_tail():
    """The target writes to the end: what it writes need not be what the tail says."""
    one = Served([11, 12, 13, 14, 15, 16, 17, 18], segment="tokens:5")
    one.controller.mode = "never"
    one.judge([0.9], choice=16)
    assert (one.state.phase, one.state.draft) == (Phase.DECODING, Draft())
    assert one.state.draft_kv_len <= one.state.committed


# -- verdicts against the target's own choices -------------------------------------------


def prefixes_of(one: Served) -> tuple[int, int]:
    stats = one.state.notes.telemetry.stats
    return stats.matched_prefixes, stats.rejected_matched_prefixes


def test_prefixes_that_the_target_would_have_written_are_counted_and_the_rejected_ones_of_them():
    one = Served([11, 12, 13, 14, 15, 16])
    one.agree([0.9, 0.4, 0.1], but_at=4)  # the third prefix is not the target's own
    assert prefixes_of(one) == (2, 1)


@pytest.mark.parametrize(
    ("top_k", "threshold", "simulated"), [(40, 0.5, ""), (1, 1.1, ""), (1, 0.5, "0.5")]
)
def test_nothing_is_counted_where_verdicts_or_choices_are_no_evidence(
    top_k: int, threshold: float, simulated: str, monkeypatch: pytest.MonkeyPatch
):
    """Sampled choices, a threshold that rejects everything, verdicts that decide nothing."""
    if simulated:
        monkeypatch.setenv(SIMULATION, simulated)
    one = Served([11, 12, 13, 14])
    one.req.sampling_params.top_k = top_k
    one.state.policy = replace(one.state.policy, threshold=threshold)
    one.agree([0.1, 0.1])
    assert prefixes_of(one) == (0, 0)


@pytest.mark.parametrize(("verdict", "warnings"), [(0.1, 1), (0.9, 0)])
def test_a_question_that_contradicts_the_target_is_reported_once(
    verdict: float, warnings: int, caplog: pytest.LogCaptureFixture
):
    # Parsing a server's command line, as other tests do, lets SGLang raise the root's level.
    caplog.set_level(logging.WARNING, logger="sglang_parse")
    one = Served([11, 12])
    one.ask()
    for count in range(2 * WINDOW):
        assert len(caplog.records) == warnings * (count >= WINDOW)
        one.verdicts.observe(one.req, rejected([verdict]))
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == warnings
    assert all("16 of 16 prefixes (100 %)" in text for text in texts)


def test_a_clients_threshold_says_nothing_about_the_servers(caplog: pytest.LogCaptureFixture):
    """One client asks for 1: its rejections are counted for it, and nobody is warned."""
    caplog.set_level(logging.WARNING, logger="sglang_parse")
    one = Served([11, 12])
    one.ask()
    one.state.policy = replace(one.state.policy, threshold=1.0)
    for _ in range(2 * WINDOW):
        one.verdicts.observe(one.req, rejected([0.9]))
    assert not caplog.records
    assert prefixes_of(one) == (2 * WINDOW, 2 * WINDOW)


@pytest.mark.parametrize(("num_steps", "warnings"), [(8, 1), (0, 0)])
def test_a_judge_that_loses_to_the_token_check_is_reported_once(
    num_steps: int, warnings: int, caplog: pytest.LogCaptureFixture
):
    """Both keep four tokens of eight and one of the target's. Then lines are left to the target."""
    caplog.set_level(logging.WARNING, logger="sglang_parse")
    one = Served([11, 12, 13, 14, 15, 16, 17, 18])
    one.ask()
    outcome = Round(
        one.state.draft,
        accepted_len=4,
        verdicts=Verdicts([0.9, 0.9, 0.1, 0.1], [1.0] * 4),
        rule="first-reject",
        target_tokens=[11, 12, 13, 14, NOT_THE_DRAFTS],
    )
    for count in range(2 * RIVAL_WINDOW):
        assert len(caplog.records) == warnings * (count >= RIVAL_WINDOW)
        for _ in range(num_steps):
            one.verdicts.note_step(one.state)
        one.verdicts.observe(one.req, outcome)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == warnings
    said = "a refusal every 5 tokens costs 8.0 decode steps, so a target forward outputs 1.4 tokens"
    assert all(said in text and "token would output 5.0 of the same" in text for text in texts)


# -- traces ------------------------------------------------------------------------------


def test_a_trace_is_bounded(monkeypatch: pytest.MonkeyPatch):
    """The round that exceeds the bound is the last one; requests with hidden states reach it."""
    monkeypatch.setattr(request_telemetry, "MAX_TRACE_BYTES", 1000)
    one, sizes = Served([11, 12]), []
    for rounds in range(1, 5):
        one.state.give_draft([11, 12], 1)
        one.agree([0.9])
        sizes = [len(json.dumps(record)) for record in one.state.notes.telemetry.trace]
        assert (one.state.notes.telemetry.stats.rounds, one.state.notes.telemetry.trace_bytes) == (
            rounds,
            sum(sizes),
        )
    assert sum(sizes[:-1]) < 1000 <= sum(sizes)
    assert one.state.notes.telemetry.is_trace_full
    assert len(sizes) < 4
    before = one.state.notes.telemetry.trace_bytes
    record = {**one.state.notes.telemetry.trace[0], "hidden_states": {"data": "x" * 10**6}}
    one.state.notes.telemetry.add_record(record)
    assert one.state.notes.telemetry.trace_bytes == before + sizes[0] + 10**6


@pytest.mark.parametrize(
    ("verdicts", "num_shown"), [([0.9, 0.2, 0.1], 2), ([0.2, 0.9, 0.9], 0), ([0.9, 0.9, 0.9], 6)]
)
def test_a_trace_has_no_more_of_an_earlier_answer_than_was_output(
    verdicts: list[float], num_shown: int
):
    """The draft is somebody else's text, and the target's choices after it repeat that text."""
    secret = [11, 12, 13, 14, 15, 16]
    one = Served(secret, selection="first-reject")
    one.state.draft.source = ANSWERS
    output = one.agree(verdicts, but_at=num_shown if num_shown < 6 else None)
    (record,) = one.state.notes.telemetry.trace
    assert record["draft_token_ids"] == secret[:num_shown] == output[:num_shown]
    assert record["target_token_ids"] == output[: num_shown + 1]
    num_prefixes = num_shown // 2
    assert record["prefix_ends"] == [2, 4, 6][:num_prefixes]
    assert record["verdicts"] == verdicts[:num_prefixes]
    assert len(record["question_token_ids"]) == len(record["verdict_mass"]) == num_prefixes
    assert record["decided_by"] == (2 if num_shown == 6 else None)
    seen = json.dumps({**record, "bonus_token_ids": [], "question_token_ids": []})
    assert not [token for token in secret[num_shown:] if re.search(rf"\b{token}\b", seen)]
    other = Served(secret, selection="first-reject")
    other.agree(verdicts)
    assert (
        other.state.notes.telemetry.trace[0]["draft_token_ids"] == secret
    )  # its own client's, or the model's


def test_nor_more_of_its_hidden_states():
    one = Served([11, 12, 13, 14])
    one.state.draft.source = ANSWERS
    found = Round(
        one.ask(),
        accepted_len=2,
        bonus=(77,),
        verdicts=Verdicts([0.9, 0.1], [None, None]),
        decided_by=1,
        rule="first-reject",
        target_tokens=[11, 12, 77, 14, 15],
        scores=[[0.0, 0.0, -k, k] for k in range(5)],
    )
    one.verdicts.captured = CapturedLayers((3,), 8)
    record = trace_record(one.state, found, one.verdicts, torch.zeros(5, 8))
    assert record["hidden_states"]["shape"] == [3, 8]
    assert (record["draft_logprobs"], record["draft_entropies"]) == ([0, -1], [0, 1])


def test_no_draft_begins_inside_forced_text(monkeypatch: pytest.MonkeyPatch):
    """Drafting resumes at the first token after which the grammar lets a draft begin."""
    one, is_free = Served([11, 12, 13, 14]), False
    monkeypatch.setattr(commit_module, "ends_in_forced_text", lambda _: not is_free)
    one.judge([0.1, 0.1])
    for _ in range(6):
        assert one.state.phase is Phase.DECODING
        one.decode()
    is_free = True
    one.decode()
    assert one.state.phase is Phase.DRAFTING


@pytest.mark.parametrize("segment", ["line", "sentence", "tokens:2"])
def test_a_step_reads_the_newest_tokens_only(segment: str):
    """Its work does not grow with the answer, where no segment ends, either."""
    one = Served([11, 12, 13, 14], segment=segment, limit=20_000)
    one.state.policy = replace(one.state.policy, strict=("numbers",))
    output = one.state.output_ids = Watched([1] * 16_000)
    one.judge([0.1] * (2 if segment == "tokens:2" else 1))
    one.controller.mode = "never"
    one.state.phase = Phase.DECODING
    for _ in range(5):
        one.decode()
    assert len(output) == 16_006
    assert 0 < output.num_read < 200


@pytest.mark.parametrize("fails", ["verdicts", "_bonus_tokens"])
def test_an_error_in_a_commit_ends_the_request(monkeypatch: pytest.MonkeyPatch, fails: str):
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("of the client's words")

    one = Served([11, 12, 13, 14])
    monkeypatch.setattr(one.verdicts if fails == "verdicts" else one.committer, fails, fail)
    assert one.judge([0.9, 0.9]) == []
    assert one.state.fault == "committing its tokens failed: ZeroDivisionError"


def test_a_fault_of_the_logits_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verify_module, "broadcast", lambda rows: rows)
    one = Served([11, 12, 13, 14])
    nan = "NaN in the target model's logits"
    for fault, token, score in (
        (nan, NO_TOKEN, 0.0),
        (NO_LOGITS, NO_LOGIT, 0.0),
        (nan, 6, math.nan),
    ):
        state, one.state.draft = one.state, Draft([11])
        state.phase, state.fault = Phase.VERIFYING, ""
        tokens = torch.tensor([5, token])
        scores = torch.tensor([[math.nan, 0.0], [score, 0.0]])
        forward = TargetForward(
            [verify_rows(0, one.req)],
            [RowResults(tokens, scores)],
            [one.req],
            hidden=None,
            replays=False,
            output=None,
        )
        (result,) = forward.wait()
        assert result.fault == fault
        assert commit(one, result) == []
        assert one.state.fault == fault
