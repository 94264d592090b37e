"""Commits a target forward's results: accepts draft tokens, outputs them, and moves requests on.

A round is a draft and its verify pass. After the accepted prefix, draft tokens that match the
target's choices are accepted too, followed by one bonus token. Drafting resumes right behind it, or
behind a rejected segment that the target ends (``Judge.leaves_segments``).

Tokens are output before anything is decided about what follows them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.counters import Counters
from sglang_parse.core.phases import MODEL, Action, Draft, Phase, VerifyOutcome
from sglang_parse.core.request import RequestState
from sglang_parse.core.selection import Selection, matching_tokens, select, up_to_stop
from sglang_parse.core.simulation import ENV_VAR as SIMULATION
from sglang_parse.core.simulation import SimulatedAcceptance, place_of
from sglang_parse.engine.faults import contain_request
from sglang_parse.engine.judge.judge import Judge, Verdicts
from sglang_parse.engine.logits.grammar import ends_in_forced_text, num_allowed
from sglang_parse.engine.requests import completes_answer, is_complete, is_gone, tokens_left
from sglang_parse.engine.sglang_types import Req
from sglang_parse.engine.sources.chain import SourceChain
from sglang_parse.engine.sources.eagle import take_chain
from sglang_parse.engine.trace import trace_record
from sglang_parse.engine.verify import TargetResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Accepted:
    """One request's part of a target forward, output.

    A draft "a b c d" of which a verdict accepts "a b", after which the target chooses "c" and then
    "x": tokens a b c x, accepted_len 2, and x is the bonus token.

    Attributes:
        tokens: what was output; none if the request has failed.
        draft: the verified draft; None after a decode step.
        selection: its accepted part.
    """

    tokens: Sequence[int] = ()
    draft: Draft | None = None
    selection: Selection = Selection(0)

    @property
    def bonus(self) -> Sequence[int]:
        """Tokens behind the accepted part."""
        return self.tokens[self.selection.accepted_len :]


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
        given = state.policy.draft_token_ids
        if state.output_ids or given[:1] != (first_id,):  # retracted, or its grammar refused it
            given = ()
        state.begin(first_id)
        if state.phase is Phase.DRAFTING and not given and not is_complete(req):
            self._resume_drafting(req)
        if given and self._judge_of(state) is not None:
            allowed = given[1 : 1 + num_allowed(req, given[1:])]
            state.give_draft(allowed, self.config.max_prefixes)
        self.ask(req)

    def accept(self, req: Req, result: TargetResult) -> Accepted:
        """Outputs what the target forward brought the request; ``move_on`` follows."""
        state = req.parse_state
        if result.fault:
            state.fail(result.fault)
        with contain_request(state, "committing its tokens"):
            if not state.fault:
                accepted = self._accept(req, result)
                state.write(accepted.tokens)
                return accepted
        return Accepted()

    def _accept(self, req: Req, result: TargetResult) -> Accepted:
        state = req.parse_state
        if result.is_chain:
            take_chain(req, result.proposed)
            self.ask(req)
        if result.is_round:
            return self._accept_round(req, result)
        # An in-flight decode step that drafting has overtaken is dropped.
        if result.action is Action.DECODE and not state.target_decodes:
            return Accepted()
        tokens, is_eagle = result.target_tokens, result.action is Action.EAGLE_DECODE
        if is_eagle:
            num_output = min(matching_tokens(result.proposed, tokens) + 1, tokens_left(req))
            tokens = tokens[: max(1, num_output)]
        tokens = up_to_stop(tokens, state.policy.stop_ids)
        state.finish_decode(len(tokens), is_eagle=is_eagle)
        return Accepted(tokens)

    def move_on(self, req: Req, accepted: Accepted) -> None:
        """Chooses the request's next phase, behind what was output, and asks about its draft."""
        with contain_request(req.parse_state, "its next draft"):
            if accepted.draft is not None:
                self._after_round(req, accepted, accepted.draft)
            elif accepted.tokens:
                self._after_decode(req, len(accepted.tokens))
        self.ask(req)

    def poll(self, reqs: Sequence[Req]) -> None:
        """Takes texts that have arrived; requests that waited for them start drafts."""
        self.sources.poll(reqs)
        for req in reqs:
            state = req.parse_state
            if state.phase is Phase.WAITING and not is_gone(req):
                with contain_request(state, "its wait for a draft"):
                    if reason := self.sources.resume(req):
                        state.skip_draft(reason)

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

    def _accept_round(self, req: Req, result: TargetResult) -> Accepted:
        state, draft = req.parse_state, req.parse_state.draft
        verdicts, judge = Verdicts(), self._judge_of(state)
        if judge is not None:
            verdicts = judge.verdicts(state, result.scores, result.answers, result.target_tokens)
        selection = self._select(req, result, verdicts)
        accepted_len = selection.accepted_len
        bonus = self._bonus_tokens(req, accepted_len, result)
        matched = matching_tokens(draft.verified_ids[accepted_len:], bonus)
        has_failed = self._observe(req, result, verdicts, accepted_len, matched)
        state.finish_round(accepted_len, matched, len(bonus), has_failed=has_failed)
        if state.policy.keep_trace and not state.telemetry.is_trace_full:
            layers = self.judge.layers if self.judge else ()
            state.telemetry.add_record(
                trace_record(state, result, verdicts, selection, bonus, judge, layers)
            )
        return Accepted((*draft.token_ids[:accepted_len], *bonus), draft, selection)

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
            verdicts.values,
            draft.prefix_ends,
            threshold,
            self.config.selection,
            is_finished=draft.finished,
            refused_at=verdicts.refused_at,
        )

    def _bonus_tokens(self, req: Req, accepted_len: int, result: TargetResult) -> Sequence[int]:
        """Matched draft tokens after the accepted prefix, then the target's next token."""
        if completes_answer(req, accepted_len):
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

    def _after_round(self, req: Req, accepted: Accepted, draft: Draft) -> None:
        """Drafting, where a draft may begin and is expected to pay."""
        state, selection = req.parse_state, accepted.selection
        rejected = selection.accepted_len < draft.num_verified
        left_open = rejected and self._is_in_segment(state, len(accepted.bonus))
        state.start_decode(in_segment=left_open)
        drafts = self._may_resume(req) and self._resume_drafting(req)
        may_carry = drafts and draft.source == state.draft.source == MODEL
        state.carry_over(_carry_over(draft, accepted) if may_carry else ())

    # -- decode -----------------------------------------------------------------

    def _after_decode(self, req: Req, num_tokens: int) -> None:
        state = req.parse_state
        if state.in_segment and self.judge is not None:
            self.judge.note_step(state)
        if state.in_segment and not self._is_in_segment(state, num_tokens):
            state.end_segment()
        if state.phase is Phase.DECODING and self._may_resume(req):
            self._resume_drafting(req)

    def _is_in_segment(self, state: RequestState, num_tokens: int) -> bool:
        """Whether the target has still to end a rejected segment, of which it has written the last
        ``num_tokens``."""
        judge = self._judge_of(state)
        if judge is None or not judge.leaves_segments:
            return False
        return not judge.segments.ends_in(state.output_ids, len(state.output_ids) - num_tokens)

    def _may_resume(self, req: Req) -> bool:
        """Whether a draft may begin: not after the answer's end, and not inside text that a
        grammar forces, but in token mode."""
        state = req.parse_state
        if is_complete(req) or state.in_segment:
            return False
        return self._judge_of(state) is None or not ends_in_forced_text(state)

    def _resume_drafting(self, req: Req) -> bool:
        """Starts a draft if one is expected to pay; else the target decodes one more token."""
        reason = self.sources.start(req)
        if reason:
            req.parse_state.skip_draft(reason)
        return not reason

    def _report_simulation(self, simulated: SimulatedAcceptance) -> None:
        self.counters.simulated_accept_ratio = simulated.fraction
        logger.warning(
            "PARSE: simulated acceptance (%s=%s): verdicts are computed and ignored, %s is "
            "accepted; up to %d tokens a draft. For benchmarks only: the output is meaningless.",
            SIMULATION,
            os.environ[SIMULATION],
            simulated,
            self.config.draft_tokens,
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
        is_finished=completes_answer(req, drafted),
        num_matched=matched,
    )


def _carry_over(draft: Draft, accepted: Accepted) -> tuple[int, ...]:
    """The unverified end of a draft, for the next draft to begin with.

    A draft that its budget ended inside a segment has tokens after its last prefix. If everything
    before them is output and the target's next token is the first of them, the draft model would
    write the rest again at the same positions: its KV is there.
    """
    last = len(accepted.tokens) - 1
    if accepted.selection.decided_by is None or last < draft.num_verified:
        return ()
    unverified = draft.token_ids[last:]
    return tuple(unverified[1:]) if unverified[:1] == [*accepted.bonus[-1:]] else ()
