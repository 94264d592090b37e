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
from itertools import takewhile

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.counters import Counters
from sglang_parse.core.phases import MODEL, Action, Draft, Phase
from sglang_parse.core.request import RequestState
from sglang_parse.core.round import Round, Verdicts
from sglang_parse.core.selection import matching_tokens, select, up_to_stop
from sglang_parse.core.simulation import ENV_VAR as SIMULATION
from sglang_parse.core.simulation import SimulatedAcceptance, place_of
from sglang_parse.engine.faults import contain_request
from sglang_parse.engine.judge.judge import Judge
from sglang_parse.engine.logits.grammar import ends_in_forced_text, num_allowed
from sglang_parse.engine.requests import completes_answer, is_complete, is_gone, tokens_left
from sglang_parse.engine.sglang_types import Req
from sglang_parse.engine.sources.chain import SourceChain
from sglang_parse.engine.sources.eagle import take_chain
from sglang_parse.engine.trace import trace_record
from sglang_parse.engine.verify import TargetResult

logger = logging.getLogger(__name__)


class Committer:
    """Applies target results to requests; ``judge`` is None in token mode.

    Attributes:
        compares_candidates: whether passes have candidates behind drafts; not where acceptance is
            simulated, or where a pass that is not output whole gives recurrent states back.
    """

    def __init__(
        self, config: ParseConfig, judge: Judge | None, counters: Counters, sources: SourceChain
    ) -> None:
        self.config, self.judge = config, judge
        self.counters, self.sources = counters, sources
        self._simulated = SimulatedAcceptance.from_env(config)
        self.compares_candidates = self._simulated is None
        if self._simulated is not None:
            self._report_simulation(self._simulated)

    def begin(self, req: Req, first_id: int | None) -> None:
        """Starts a request after its prefill, which sampled ``first_id`` if any token: with a
        draft, or with a token of the target's."""
        state = req.parse_state
        given = state.policy.draft_token_ids
        if state.output_ids or given[:1] != (first_id,):  # retracted, or its grammar refused it
            given = ()
        state.begin(first_id)
        if state.phase is Phase.DRAFTING and not given and not is_complete(req):
            self._resume_drafting(req)
        if given and state.policy.judge:
            allowed = given[1 : 1 + num_allowed(req, given[1:])]
            state.give_draft(allowed, self.config.max_prefixes)
        self.ask(req)

    def take_proposals(self, reqs: Sequence[Req], proposals: Sequence[Sequence[int]]) -> None:
        """What a head proposed is each request's draft."""
        for req, token_ids in zip(reqs, proposals, strict=True):
            state = req.parse_state
            with contain_request(state, "taking a proposal"):
                take_chain(req, token_ids)
                if len(token_ids) == state.num_drafted > 0:  # no stop token ends it, no grammar
                    num_free = req.kv.kv_allocated_len - state.committed_len - 1
                    self.sources.extend(req, num_free - state.num_drafted)
            self.ask(req)

    def accept(self, req: Req, result: TargetResult) -> Round:
        """Outputs what the target forward brought the request; ``move_on`` follows.

        Returns:
            One without tokens if the request has failed, or has gone on without it.
        """
        state = req.parse_state
        if result.fault:
            state.fail(result.fault)
        with contain_request(state, "committing its tokens"):
            if not state.fault:
                is_step = result.part.action is Action.DECODE
                one = self._accept_step(req, result) if is_step else self._accept(req, result)
                state.write(one.tokens)
                return one
        return Round()

    def _accept_step(self, req: Req, result: TargetResult) -> Round:
        """A decoded token. An in-flight decode step that drafting has overtaken is dropped."""
        state = req.parse_state
        if not state.target_decodes:
            return Round()
        state.count_decode(len(result.target_tokens))
        return Round(bonus=tuple(result.target_tokens))

    def move_on(self, req: Req, one: Round) -> None:
        """Chooses the request's next phase, behind what was output, and asks about its draft."""
        state, draft = req.parse_state, req.parse_state.draft
        with contain_request(state, "its next draft"):
            if one.tokens:
                self._move_on(req, one)
            elif state.phase is Phase.VERIFYING and draft.room and not draft.prefix_ends:
                self.sources.extend(req, draft.room)
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
        """Attaches the questions to a complete draft, and chooses the candidates behind it."""
        state, draft = req.parse_state, req.parse_state.draft
        judge = self._judge_of(draft)
        with contain_request(state, "asking about its draft"):
            if judge is not None and draft.token_ids and not draft.prefix_ends:
                judge.ask(req)
            if draft.candidates and state.phase is Phase.VERIFYING:
                count = _num_comparable(req)
                state.keep_candidates(count if self.candidates_pay(req, count) else 0)

    def candidates_pay(self, req: Req, count: int) -> bool:
        """See ``Source.candidates_pay``."""
        return self.compares_candidates and self.sources.candidates_pay(req, count)

    def _judge_of(self, draft: Draft) -> Judge | None:
        return self.judge if draft.judge else None

    # -- drafts -----------------------------------------------------------------

    def _accept(self, req: Req, result: TargetResult) -> Round:
        state, draft, verdicts = req.parse_state, req.parse_state.draft, Verdicts()
        judge = self._judge_of(draft)
        if judge is not None:
            verdicts = judge.verdicts(state, result.scores, result.answers, result.target_tokens)
        accepted_len, decided_by, rule = self._select(req, result, verdicts)
        one = Round(
            draft,
            accepted_len,
            bonus=self._bonus_tokens(req, accepted_len, result),
            is_finished=completes_answer(req, len(draft.token_ids)),
            verdicts=verdicts,
            decided_by=decided_by,
            rule=rule,
            target_tokens=result.target_tokens,
            scores=result.scores,
        )
        self.counters.count_round(one)
        if judge is not None:
            judge.observe(req, one)
        self.sources.observe(req, one)
        if state.policy.keep_trace and not state.notes.telemetry.is_trace_full:
            hidden = result.hidden if state.policy.keep_hidden_states else None
            state.notes.telemetry.add_record(trace_record(state, one, self.judge, hidden))
        state.count_round(one)
        return one

    def _select(
        self, req: Req, result: TargetResult, verdicts: Verdicts
    ) -> tuple[int, int | None, str | None]:
        """Accepts a prefix by its verdicts; token by token the draft tokens that the target chose,
        which is exact for greedy and sampled output.

        Returns:
            ``Round.accepted_len``, ``decided_by`` and ``rule``.
        """
        state, simulated, rule = req.parse_state, self._simulated, self.config.selection
        draft, threshold = state.draft, state.policy.threshold
        if draft.judge is None:
            matched = matching_tokens(draft.token_ids, result.target_tokens)
            return 0 if state.policy.rejects_all else matched, None, None
        if simulated and not state.policy.rejects_all:
            place = place_of(req.origin_input_ids, len(state.output_ids))
            ends = draft.prefix_ends
            return simulated.accepted_len(len(draft.token_ids), ends, place), None, None
        accepted_len, decided_by = select(
            verdicts.values,
            draft.prefix_ends,
            threshold,
            rule,
            is_finished=draft.finished,
            refused_at=verdicts.refusal.place if verdicts.refusal else None,
        )
        return accepted_len, decided_by, rule

    def _bonus_tokens(self, req: Req, accepted_len: int, result: TargetResult) -> tuple[int, ...]:
        """Matched draft tokens and candidates after the accepted prefix, then the target's next
        token."""
        if completes_answer(req, accepted_len):
            return ()
        state, choices = req.parse_state, result.target_tokens[accepted_len:]
        # Simulated acceptance fixes what a draft brings.
        drafted = () if self._simulated else state.draft.compared_ids[accepted_len:]
        tokens = choices[: matching_tokens(drafted, choices) + 1]
        return up_to_stop(tokens[: tokens_left(req) - accepted_len], state.policy.stop_ids)

    def _move_on(self, req: Req, one: Round) -> None:
        """Drafting, where a draft may begin and is expected to pay."""
        state, left = req.parse_state, 0
        if state.in_segment and self.judge is not None:
            self.judge.note_step(state)
            left = len(one.tokens)
        elif one.draft.judge and one.is_rejected:
            left = len(one.bonus)
        state.start_decode(in_segment=left > 0 and self._is_in_segment(state, left))
        drafts = self._may_resume(req) and self._resume_drafting(req)
        may_carry = drafts and one.draft.source == state.draft.source == MODEL
        state.carry_over(_carry_over(one) if may_carry else ())

    def _is_in_segment(self, state: RequestState, num_tokens: int) -> bool:
        """Whether the target has still to end a rejected segment, of which it has written the last
        ``num_tokens``."""
        judge = self.judge
        if judge is None or not judge.leaves_segments:
            return False
        return not judge.segments.ends_in(state.output_ids, len(state.output_ids) - num_tokens)

    def _may_resume(self, req: Req) -> bool:
        """Whether a draft may begin: not after the answer's end, and not inside text that a
        grammar forces, but in token mode."""
        state = req.parse_state
        if state.policy.is_plain or state.in_segment or is_complete(req):
            return False
        return not state.policy.judge or not ends_in_forced_text(state)

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


def _num_comparable(req: Req) -> int:
    """Leading candidates that a complete draft's pass can compare: none where KV is short, or where
    the draft's unverified end begins the next one. The answer's end is left to the target."""
    state, draft = req.parse_state, req.parse_state.draft
    if draft.is_truncated or draft.num_verified < state.num_drafted:
        return 0
    limit = max(0, tokens_left(req) - 1 - state.num_drafted)
    stop_ids = state.policy.stop_ids
    more = takewhile(lambda token: token not in stop_ids, draft.candidates[:limit])
    return max(0, num_allowed(req, [*draft.token_ids, *more]) - state.num_drafted)


def _carry_over(one: Round) -> tuple[int, ...]:
    """The unverified end of a draft, for the next draft to begin with.

    A draft that its budget ended inside a segment has tokens after its last prefix. If everything
    before them is output and the target's next token is the first of them, the draft model would
    write the rest again at the same positions: its KV is there, but that of a text's tail.
    """
    last = len(one.tokens) - 1
    if one.decided_by is None or last < one.num_verified or one.draft.tail_source:
        return ()
    unverified = one.draft.token_ids[last:]
    return tuple(unverified[1:]) if unverified[:1] == [*one.bonus[-1:]] else ()
