"""Decide: what the target's numbers mean for each request. States are read here, never changed.

A round is a draft and its judgement. What follows a round, and what follows each token the target
writes, is told as an ``Outcome``; the iteration commits it.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence
from dataclasses import replace
from operator import ne
from typing import Any

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.counters import Counters
from sglang_parse.core.phases import Outcome, Phase, Questions, Round, Standing
from sglang_parse.core.policy.acceptance import VerifyOutcome
from sglang_parse.core.policy.controller import Controller
from sglang_parse.core.question import LOW_VERDICT_MASS, Question
from sglang_parse.core.request import Draft, RequestState
from sglang_parse.core.segment import evenly_spaced, first_segment_end, prefix_ends
from sglang_parse.core.selection import Selection, matching_tokens, select
from sglang_parse.core.simulation import ENV_VAR as SIMULATION
from sglang_parse.core.simulation import SimulatedAcceptance
from sglang_parse.engine.batch import is_gone, tokens_left
from sglang_parse.engine.broadcast import NO_TOKEN
from sglang_parse.engine.faults import NAN_IN_TARGET
from sglang_parse.engine.readout import Readout, Spoken, trace_record
from sglang_parse.telemetry.drift import DriftWatch

logger = logging.getLogger(__name__)


class Rounds:
    """One server's decisions.

    Args:
        config: its settings.
        tokenizer: the target's.
        question: what passes ask; None in token mode.
        controller: whether and how to draft; learns from every round.
        counters: what is counted.
        drift: what compares verdicts with the certificate's.
    """

    def __init__(
        self,
        config: ParseConfig,
        tokenizer: Any,
        question: Question | None,
        controller: Controller,
        counters: Counters,
        drift: DriftWatch | None = None,
    ) -> None:
        self.config = config
        self.controller = controller
        self.counters = counters
        self.drift = drift
        self.rule = config.segment_rule
        self.question = question
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}
        self._low_mass_reported = False
        self._simulated = SimulatedAcceptance.from_env(config)
        if self._simulated is not None:
            self._report_simulation(self._simulated)

    def begin(self, state: RequestState) -> Standing:
        """After a prefill: a draft, or the target's own first segment."""
        if state.phase is not Phase.DRAFTING:
            return state.standing
        return self._draft_again(state, state.standing, len(state.output_ids))

    def decide(self, batch: Any, spoken: Spoken) -> dict[int, Outcome]:
        """What the target's words mean, per row of the batch; nothing for requests that are gone.

        A step's token whose predecessor has ended what it continued means nothing either.
        """
        reqs, outcomes = batch.reqs, {}
        for part, readout in spoken.judged:
            if not is_gone(reqs[part.row]):
                outcomes[part.row] = self.judged(reqs[part.row], readout)
        for row, proposed, readout in spoken.checked:
            if not is_gone(reqs[row]):
                outcomes[row] = self.checked(reqs[row], proposed, readout)
        for row, token in spoken.stepped:
            state: RequestState = reqs[row].parse_state
            if not is_gone(reqs[row]) and state.is_stepping:
                outcomes[row] = self.stepped(state, token)
        return outcomes

    # -- drafts -----------------------------------------------------------------

    def questions(self, req: Any) -> Questions | None:
        """What to ask about the request's draft; None while it is not over, and in token mode."""
        state: RequestState = req.parse_state
        if state.phase is not Phase.VERIFYING or self.question is None:
            return None
        draft, question = state.draft, self.question
        pieces = [self._piece(token) for token in draft.token_ids]
        all_ends = prefix_ends(pieces, self.rule, finished=_is_whole(req), max_prefixes=len(pieces))
        most = state.plan.max_prefixes if state.plan else self.config.max_prefixes
        ends = evenly_spaced(all_ends, most)
        was_thinking = self._is_thinking(req)
        ids = [
            question.ids_for(
                draft.token_ids[:end],
                complete=draft.finished and end == state.num_drafted,
                was_thinking=was_thinking,
                ends_line=pieces[end - 1].endswith("\n"),
            )
            for end in ends
        ]
        return Questions(ends, ids, len(all_ends), was_thinking)

    def _is_thinking(self, req: Any) -> bool:
        """Whether a think block is open behind the output so far; looks only at what is new."""
        state: RequestState = req.parse_state
        thinking = self.question.thinking if self.question else None
        if thinking is None:
            return False
        before = state.is_thinking
        if not state.num_scanned:
            before = thinking.is_open_after(req.origin_input_ids)
        return thinking.is_open_after(state.output_ids[state.num_scanned :], before)

    def judged(self, req: Any, readout: Readout) -> Outcome:
        """A draft was judged: what is kept of it, then what the target writes behind that, unless
        the answer ends there.

        Args:
            req: the request.
            readout: what the target says about its rows of the pass.
        """
        if readout.is_faulty:
            return Outcome(fault=NAN_IN_TARGET)
        state: RequestState = req.parse_state
        self._watch_mass(readout)
        selected = self._select(state, readout)
        cut = selected.accepted_len
        own = self._own(req, cut, readout)
        matched = matching_tokens(state.draft.judged_ids[cut:], own)
        record = None
        if state.policy.keep_trace:
            record = trace_record(state, readout, selected, own, self.question)
        self.counters.observe_verify(state.num_drafted, cut, readout.verdicts)
        if self.drift is not None and not state.stats.rounds:
            self._compare(self.drift, readout.verdicts)
        judgement = _judgement(req, cut, matched, readout.choices)
        self.controller.observe_round(
            state.policy.threshold, judgement, num_failed=state.num_failed
        )
        num_failed = state.num_failed + 1 if judgement.has_failed else 0
        standing = self._after_round(state, cut, own, num_failed)
        tail = () if standing.plan is None else _tail(state.draft, selected, own)
        if standing.plan and tail:  # it has been written: no plan makes it shorter
            longest = max(standing.plan.draft_tokens, len(tail) + 1)
            standing = replace(standing, plan=replace(standing.plan, draft_tokens=longest))
        tokens = (*state.draft.token_ids[:cut], *own)
        return Outcome(tokens, len(own), standing, Round(cut, matched, tail, record))

    def _select(self, state: RequestState, readout: Readout) -> Selection:
        """What is kept of the draft.

        In token mode the target's own choice at every place, greedy or sampled, decides: exact
        either way.
        """
        draft, threshold = state.draft, state.policy.threshold
        if self.question is None:
            matched = matching_tokens(draft.token_ids, readout.choices)
            return Selection(0 if threshold > 1 else matched)
        if self._simulated and threshold <= 1:  # above 1 is exact, simulated or not
            return Selection(self._simulated.accepted_len(len(draft.token_ids), draft.prefix_ends))
        return select(
            *(readout.verdicts, draft.prefix_ends, threshold, self.config.selection),
            is_finished=draft.finished,
        )

    def _own(self, req: Any, cut: int, readout: Readout) -> Sequence[int]:
        """What the pass says the target writes behind what is kept: its next token, and before it
        the draft's, as far as the target would have written them itself."""
        if _ends_answer(req, cut):
            return ()
        state: RequestState = req.parse_state
        choices = readout.choices[cut:]
        # A simulated share is all that a draft is worth.
        judged = () if self._simulated else state.draft.judged_ids[cut:]
        own = choices[: matching_tokens(judged, choices) + 1][: tokens_left(req) - cut]
        return _up_to(own, state.policy.stop_ids)

    def _after_round(
        self, state: RequestState, cut: int, own: Sequence[int], num_failed: int
    ) -> Standing:
        rejected = cut < state.draft.num_judged
        start = len(state.output_ids) + cut
        standing = Standing(Phase.DECODING, start, num_failed=num_failed)
        if rejected and self.config.on_reject == "decode":
            return replace(standing, resumes=False)
        if rejected and self._segment_end(state, standing, own, len(own)) is None:
            return standing
        return self._draft_again(state, standing, start + len(own))

    # -- the target's own tokens ------------------------------------------------

    def checked(self, req: Any, proposed: Sequence[int], readout: Readout) -> Outcome:
        """What the target would have written itself of an EAGLE-3 head's proposal, and its next
        token.

        Args:
            req: the request.
            proposed: token ids behind the last output token, as far as its pass went.
            readout: the target's own choices, [len(proposed) + 1].
        """
        if readout.is_faulty:
            return Outcome(fault=NAN_IN_TARGET)
        matched = matching_tokens(proposed, readout.choices)
        written = readout.choices[: matched + 1][: max(1, tokens_left(req))]
        return replace(self._after_steps(req.parse_state, written), eagle3_steps=1)

    def stepped(self, state: RequestState, token: int) -> Outcome:
        """The target wrote a token, or ``broadcast.NO_TOKEN`` where it could not."""
        if token == NO_TOKEN:
            return Outcome(fault=NAN_IN_TARGET)
        return self._after_steps(state, [token])

    def _after_steps(self, state: RequestState, tokens: Sequence[int]) -> Outcome:
        """The target wrote some tokens: drafting resumes when it may."""
        kept = _up_to(tokens, state.policy.stop_ids)
        standing = state.standing
        outcome = Outcome(kept, len(kept), standing)
        if standing.phase is not Phase.DECODING or not standing.resumes:
            return outcome
        segment = [*state.output_ids[standing.segment_start :], *kept]
        end = self._segment_end(state, standing, segment, len(kept))
        if end is None:
            return outcome
        again = self._draft_again(state, standing, len(state.output_ids) + len(kept))
        num_beyond = len(segment) - end if again.phase is Phase.DRAFTING else 0
        return replace(outcome, standing=again, num_beyond=num_beyond)

    def _segment_end(
        self, state: RequestState, standing: Standing, segment: Sequence[int], num_new: int
    ) -> int | None:
        """Where the segment that the target writes is done, in ``segment``; None while it goes on.
        Where nothing is asked, drafting may resume anywhere.

        Args:
            segment: the tokens behind its start, the last ``num_new`` of them new.
        """
        if self.question is None:
            return len(segment)
        end = first_segment_end([self._piece(token) for token in segment], self.rule, num_new)
        if end is not None and not standing.drafting_suspended:
            self.controller.observe_decoded_segment(state.policy.threshold, end)
        return end

    def _draft_again(self, state: RequestState, standing: Standing, num_written: int) -> Standing:
        """Drafting may start; it does where it pays. Else the target writes one segment more."""
        if plan := self.controller.plan(state.policy.threshold, standing.num_failed):
            return replace(standing, phase=Phase.DRAFTING, plan=plan, drafting_suspended=False)
        return replace(
            standing,
            phase=Phase.DECODING,
            segment_start=num_written,
            resumes=True,
            skipped_drafts=standing.skipped_drafts + 1,
            drafting_suspended=True,
        )

    # -- what is said -----------------------------------------------------------

    def _compare(self, drift: DriftWatch, verdicts: Sequence[float]) -> None:
        """A first draft was judged: like those of the certificate?"""
        if drift.observe(verdicts):
            self.counters.count("drifted_windows_total")
        self.counters.verdict_drift = drift.distance

    def _piece(self, token_id: int) -> str:
        """A token's text inside a text: some tokenizers drop the space a text starts with."""
        if token_id not in self._pieces:
            once, twice = (self._tokenizer.decode([token_id] * count) for count in (1, 2))
            self._pieces[token_id] = twice[len(once) :]
        return self._pieces[token_id]

    def _watch_mass(self, readout: Readout) -> None:
        """Say once that the target does not answer the question with the verdict tokens."""
        if self._low_mass_reported or not readout.mass:
            return
        mean = sum(readout.mass) / len(readout.mass)
        if mean < LOW_VERDICT_MASS:
            self._low_mass_reported = True
            logger.warning(
                "PARSE: the verdict tokens get only %.3f of the probability on average in one "
                "pass (below %.1f); verdicts mean little. Give --parse-question a wording that "
                "this model answers with the verdict words, or another pair of words (such as Yes "
                "and No), and take --parse-threshold from sglang-parse calibrate.",
                mean,
                LOW_VERDICT_MASS,
            )

    def _report_simulation(self, simulated: SimulatedAcceptance) -> None:
        """What ``core.simulation`` was asked for; never without saying so."""
        self.counters.simulated_accept_ratio = simulated.fraction
        logger.warning(
            "PARSE: acceptance is simulated (%s=%g): verdicts are computed and ignored, %.0f %% of "
            "every draft of up to %d tokens is kept. For benchmarks only: answers mean nothing.",
            SIMULATION,
            simulated.fraction,
            100 * simulated.fraction,
            self.config.draft_tokens,
        )


def _judgement(req: Any, cut: int, matched: int, choices: Sequence[int]) -> VerifyOutcome:
    """Where the request's draft was cut, as the controller learns it."""
    state: RequestState = req.parse_state
    drafted, ends = state.num_drafted, state.draft.prefix_ends
    rejected = next((end for end in ends if end > cut), None)
    if not ends and cut < drafted:  # token mode
        rejected = cut + 1
    return VerifyOutcome(
        num_drafted=drafted,
        num_verified=ends[-1] if ends else drafted,
        num_segments=state.draft.num_segments or drafted,
        accepted_len=cut,
        reject_end=rejected,
        is_finished=_is_whole(req),
        num_matched=matched,
        num_mismatched=sum(map(ne, state.draft.token_ids[:cut], choices)),
    )


def _is_whole(req: Any) -> bool:
    """Whether the answer ends with the draft: the draft model ended it, or its length limit."""
    state: RequestState = req.parse_state
    return state.draft.finished or state.num_drafted >= tokens_left(req)


def _tail(draft: Draft, selected: Selection, own: Sequence[int]) -> tuple[int, ...]:
    """The end of a draft that a new one would begin with.

    A draft that its budget ended in the middle of a segment has an end that nobody judged. Where
    all else is output and the target goes on with the same token, the draft model would write the
    rest again, at the same places of the sequence: its KV is there.
    """
    last = selected.accepted_len + len(own) - 1
    if selected.decided_by is None or last < draft.num_judged:
        return ()
    unjudged = draft.token_ids[last:]
    return tuple(unjudged[1:]) if unjudged[:1] == [*own[-1:]] else ()


def _up_to(tokens: Sequence[int], stop_ids: Container[int]) -> tuple[int, ...]:
    """The tokens to the first that ends an answer, that one included."""
    ends = (place for place, token in enumerate(tokens, start=1) if token in stop_ids)
    return tuple(tokens[: next(ends, len(tokens))])


def _ends_answer(req: Any, cut: int) -> bool:
    """Whether the kept draft ends the answer: its end, or the request's length limit."""
    state: RequestState = req.parse_state
    whole = state.draft.finished and cut == state.num_drafted
    return whole or len(state.output_ids) + cut >= req.sampling_params.max_new_tokens
