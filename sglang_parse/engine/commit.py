"""Commits a target forward's results: accepts draft tokens and moves requests to their next phase.

A round is a draft and its verify pass. After the accepted prefix, draft tokens that match the
target's choices are accepted too, followed by one bonus token. Drafting resumes right behind it, or
behind a rejected segment that the target ends (``Judge.leaves_segments``).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.counters import Counters
from sglang_parse.core.phases import (
    ANSWERS,
    MODEL,
    Action,
    Draft,
    Phase,
    TraceRecord,
    VerifyOutcome,
)
from sglang_parse.core.request import RequestState
from sglang_parse.core.selection import Selection, matching_tokens, select, up_to_stop
from sglang_parse.core.simulation import ENV_VAR as SIMULATION
from sglang_parse.core.simulation import SimulatedAcceptance, place_of
from sglang_parse.engine.faults import contain_request
from sglang_parse.engine.grammar import free_ends, num_allowed
from sglang_parse.engine.heads import encode_hidden_states
from sglang_parse.engine.requests import draft_completes_answer, is_gone, tokens_left
from sglang_parse.engine.sglang_types import Req
from sglang_parse.engine.sources.chain import SourceChain
from sglang_parse.engine.sources.eagle import take_chain
from sglang_parse.engine.verdicts import Judge, Verdicts
from sglang_parse.engine.verify import TargetResult

logger = logging.getLogger(__name__)


class Committer:
    """Applies target results to requests.

    Args:
        judge: where verdicts come from; None in token mode.
        sources: start drafts, and observe every round.
    """

    def __init__(
        self,
        config: ParseConfig,
        judge: Judge | None,
        counters: Counters,
        sources: SourceChain,
    ) -> None:
        self.config, self.judge = config, judge
        self.counters, self.sources = counters, sources
        self._simulated = SimulatedAcceptance.from_env(config)
        if self._simulated is not None:
            self._report_simulation(self._simulated)

    def begin(self, req: Req, first_id: int | None) -> None:
        """Starts a request after its prefill: with a draft, or with a token of the target's.

        Args:
            first_id: the token that the prefill sampled, if any.
        """
        state = req.parse_state
        finished = first_id in state.policy.stop_ids or tokens_left(req) <= 1
        given = state.policy.draft_token_ids
        if state.output_ids or given[:1] != (first_id,):  # retracted, or its grammar refused it
            given = ()
        if state.phase is Phase.DRAFTING and not finished and not given:
            new_ids = () if first_id is None else (first_id,)
            self._resume_drafting(req, new_ids)
        state.begin(first_id)
        if given and self._judge_of(state) is not None:
            allowed = given[1 : 1 + num_allowed(req, given[1:])]
            state.give_draft(allowed, self.config.max_prefixes)
        self.ask(req)

    def commit(self, req: Req, result: TargetResult) -> Sequence[int]:
        """Moves the request to its next phase and returns its output tokens; none if it has
        failed."""
        state = req.parse_state
        if result.fault:
            state.fail(result.fault)
        with contain_request(state, "committing its tokens"):
            tokens = () if state.fault else self._commit(req, result)
        return () if state.fault else tokens

    def _commit(self, req: Req, result: TargetResult) -> Sequence[int]:
        state = req.parse_state
        if result.is_chain:
            take_chain(req, result.proposed)
            self.ask(req)
        if result.is_round:
            return self._commit_round(req, result)
        # An in-flight decode step that drafting has overtaken is dropped.
        if result.action is Action.DECODE and not state.target_decodes:
            return ()
        tokens, is_eagle = result.target_tokens, result.action is Action.EAGLE_DECODE
        if is_eagle:
            num_matched = matching_tokens(result.proposed, tokens)
            tokens = tokens[: num_matched + 1][: max(1, tokens_left(req))]
        return self._commit_decode(req, up_to_stop(tokens, state.policy.stop_ids), is_eagle)

    def poll(self, reqs: Sequence[Req]) -> None:
        """Takes texts that have arrived; requests that waited for them start drafts."""
        self.sources.poll(reqs)
        for req in reqs:
            state = req.parse_state
            if state.phase is Phase.WAITING and not is_gone(req):
                with contain_request(state, "its wait for a draft"):
                    if reason := self.sources.resume(req):
                        state.skip_draft(reason)
                self.ask(req)

    def ask(self, req: Req) -> None:
        """Attaches the questions to a complete draft."""
        draft, judge = req.parse_state.draft, self._judge_of(req.parse_state)
        if judge is not None and draft.token_ids and not draft.prefix_ends:
            with contain_request(req.parse_state, "asking about its draft"):
                judge.ask(req)

    def _judge_of(self, state: RequestState) -> Judge | None:
        """The judge of its drafts; None if they are compared token by token."""
        return self.judge if state.policy.judge else None

    # -- drafts -----------------------------------------------------------------

    def _commit_round(self, req: Req, result: TargetResult) -> Sequence[int]:
        state, draft = req.parse_state, req.parse_state.draft
        verdicts, judge = Verdicts(), self._judge_of(state)
        if judge is not None:
            verdicts = judge.verdicts(state, result.scores, result.answers, result.target_tokens)
        selection = self._select(req, result, verdicts)
        accepted_len = selection.accepted_len
        bonus = self._bonus_tokens(req, accepted_len, result)
        matched = matching_tokens(draft.verified_ids[accepted_len:], bonus)
        record = None
        if state.policy.keep_trace and not state.is_trace_full:
            layers = self.judge.layers if self.judge else ()
            record = trace_record(state, result, verdicts, selection, bonus, judge, layers)
        has_failed = self._observe(req, result, verdicts, accepted_len, matched)
        tokens = (*draft.token_ids[:accepted_len], *bonus)
        state.finish_round(accepted_len, matched, len(bonus), has_failed=has_failed, record=record)
        self._after_round(req, draft, selection, tokens, matched)
        return tokens

    def _select(self, req: Req, result: TargetResult, verdicts: Verdicts) -> Selection:
        """Accepts a prefix by its verdicts; in token mode the draft tokens that the target chose,
        which is exact for greedy and sampled output."""
        state, simulated = req.parse_state, self._simulated
        draft, threshold = state.draft, state.policy.threshold
        if self._judge_of(state) is None:
            matched = matching_tokens(draft.token_ids, result.target_tokens)
            return Selection(0 if state.policy.rejects_all else matched)
        if simulated and not state.policy.rejects_all:
            place = place_of(req.origin_input_ids, len(state.output_ids))
            ends = draft.prefix_ends
            return Selection(simulated.accepted_len(len(draft.token_ids), ends, place))
        return select(
            *(verdicts.values, draft.prefix_ends, threshold, self.config.selection),
            is_finished=draft.finished,
            refused_at=verdicts.refused_at,
        )

    def _bonus_tokens(self, req: Req, accepted_len: int, result: TargetResult) -> Sequence[int]:
        """Matched draft tokens after the accepted prefix, then the target's next token."""
        if _ends_answer(req, accepted_len):
            return ()
        state, choices = req.parse_state, result.target_tokens[accepted_len:]
        # Simulated acceptance fixes what a draft brings.
        drafted = () if self._simulated else state.draft.verified_ids[accepted_len:]
        tokens = choices[: matching_tokens(drafted, choices) + 1]
        return up_to_stop(tokens[: tokens_left(req) - accepted_len], state.policy.stop_ids)

    def _observe(
        self,
        req: Req,
        result: TargetResult,
        verdicts: Verdicts,
        accepted_len: int,
        matched: int,
    ) -> bool:
        """Counts the outcome and feeds the controller; returns whether the draft failed."""
        outcome = _verify_outcome(req, accepted_len, matched)
        self.counters.observe_verify(outcome.num_verified, accepted_len, verdicts.values)
        judge = self._judge_of(req.parse_state)
        if judge is not None:
            choices, decides = result.target_tokens, self._simulated is None
            judge.observe(req, verdicts, choices, outcome, decides=decides)
        self.sources.observe(req, outcome)
        return outcome.has_failed

    def _after_round(
        self,
        req: Req,
        draft: Draft,
        selection: Selection,
        tokens: Sequence[int],
        matched: int,
    ) -> None:
        """The next phase behind ``tokens``, the accepted and the bonus ones: drafting, where a
        draft may begin and is expected to pay."""
        state, bonus = req.parse_state, tokens[selection.accepted_len :]
        rejected = selection.accepted_len < draft.num_verified
        state.start_decode(
            resumes=not rejected or self.config.on_reject == "redraft",
            in_segment=rejected and self._is_in_segment(state, tokens, selection.accepted_len),
        )
        carried: Sequence[int] = ()
        drafts = self._may_resume(state, tokens) and self._resume_drafting(req, tokens)
        if drafts and draft.source == state.draft.source == MODEL:
            carried = _carry_over(draft, selection, bonus)
        state.carry_over(carried, selection.accepted_len + matched + len(carried))

    # -- decode -----------------------------------------------------------------

    def _commit_decode(self, req: Req, tokens: Sequence[int], is_eagle: bool) -> Sequence[int]:
        state = req.parse_state
        if state.in_segment and self.judge is not None:
            self.judge.note_step(state)
        if state.in_segment and not self._is_in_segment(state, tokens):
            state.end_segment()
        if state.phase is Phase.DECODING and self._may_resume(state, tokens):
            self._resume_drafting(req, tokens)
        state.finish_decode(len(tokens), is_eagle=is_eagle)
        return tokens

    def _is_in_segment(self, state: RequestState, tokens: Sequence[int], start: int = 0) -> bool:
        """Whether the target has still to end a rejected segment behind ``tokens``, which this
        iteration outputs; its own begin at ``start``."""
        judge = self._judge_of(state)
        if judge is None or not judge.leaves_segments:
            return False
        return not judge.segments.ends_in(state.output_ids, tokens, start)

    def _may_resume(self, state: RequestState, tokens: Sequence[int]) -> bool:
        """Whether a draft may begin after ``tokens``, which this iteration outputs: not after the
        answer's end, and not inside text that a grammar forces, but in token mode."""
        is_over = bool(tokens) and tokens[-1] in state.policy.stop_ids
        if is_over or state.in_segment:
            return False
        if self._judge_of(state) is None or not state.resumes:
            return state.resumes
        return bool(free_ends(state, tokens, [len(tokens)]))

    def _resume_drafting(self, req: Req, new_ids: Sequence[int]) -> bool:
        """Starts a draft behind ``new_ids``, which this iteration outputs, if one is expected to
        pay; else the target decodes one more token."""
        reason = self.sources.start(req, new_ids)
        if reason:
            req.parse_state.skip_draft(reason)
        return not reason

    def _report_simulation(self, simulated: SimulatedAcceptance) -> None:
        self.counters.simulated_accept_ratio = simulated.fraction
        logger.warning(
            "PARSE: simulated acceptance (%s=%s): verdicts are computed and ignored, %s is "
            "accepted; up to %d tokens a draft. For benchmarks only: the output is meaningless.",
            *(SIMULATION, os.environ[SIMULATION], simulated, self.config.draft_tokens),
        )


def _verify_outcome(req: Req, accepted_len: int, matched: int) -> VerifyOutcome:
    state = req.parse_state
    drafted, ends = state.num_drafted, state.draft.prefix_ends
    rejected = next((end for end in ends if end > accepted_len), None)
    if not ends and accepted_len < drafted:  # token mode
        rejected = accepted_len + 1
    return VerifyOutcome(
        num_drafted=drafted,
        num_verified=ends[-1] if ends else drafted,
        accepted_len=accepted_len,
        reject_end=rejected,
        is_finished=draft_completes_answer(req),
        num_matched=matched,
    )


def trace_record(
    state: RequestState,
    result: TargetResult,
    verdicts: Verdicts,
    selection: Selection,
    bonus: Sequence[int],
    judge: Judge | None,
    layers: Sequence[int],
) -> TraceRecord:
    draft, question, refusal = state.draft, judge and judge.question, verdicts.refusal
    if draft.source == ANSWERS:  # somebody else's text
        draft, refusal = draft.accepted(selection.accepted_len), None
    num_prefixes, num_verified = len(draft.prefix_ends), draft.num_verified
    decided_by = selection.decided_by
    record: TraceRecord = {
        "output_start": len(state.output_ids),
        "source": draft.source,
        "anchor_token_id": state.output_ids[-1],
        "draft_token_ids": list(draft.token_ids),
        "finished": draft.finished,
        "prefix_ends": list(draft.prefix_ends),
        "question_token_ids": [list(ids) for ids in draft.question_ids],
        "judge": judge.name if judge else None,
        "accept_token_id": question.accept_id if question else None,
        "reject_token_id": question.reject_id if question else None,
        "verdicts": list(verdicts.values[:num_prefixes]),
        "verdict_mass": list(verdicts.mass[:num_prefixes]),
        "threshold": state.policy.threshold,
        "strict": asdict(refusal) if refusal else None,
        "selection": selection.rule,
        "accepted_len": selection.accepted_len,
        "decided_by": None if decided_by == num_prefixes else decided_by,
        "next_token_id": bonus[0] if bonus else None,
        "bonus_token_ids": list(bonus),
        "target_token_ids": list(result.target_tokens[: num_verified + 1]),
        "plan": asdict(state.plan) if state.plan else {},
    }
    if result.hidden is not None:
        hidden, scores = result.hidden[: num_verified + 1], result.scores[:num_verified]
        record["hidden_states"] = encode_hidden_states(hidden, layers)
        record["draft_logprobs"] = [row[2] for row in scores]
        record["draft_entropies"] = [row[3] for row in scores]
    return record


def _ends_answer(req: Req, accepted_len: int) -> bool:
    state = req.parse_state
    whole = state.draft.finished and accepted_len == state.num_drafted
    return whole or len(state.output_ids) + accepted_len >= req.sampling_params.max_new_tokens


def _carry_over(draft: Draft, selection: Selection, bonus: Sequence[int]) -> tuple[int, ...]:
    """The unverified end of a draft, for the next draft to begin with.

    A draft that its budget ended inside a segment has tokens after its last prefix. If everything
    before them is output and the target's next token is the first of them, the draft model would
    write the rest again at the same positions: its KV is there.
    """
    last = selection.accepted_len + len(bonus) - 1
    if selection.decided_by is None or last < draft.num_verified:
        return ()
    unverified = draft.token_ids[last:]
    return tuple(unverified[1:]) if unverified[:1] == [*bonus[-1:]] else ()
