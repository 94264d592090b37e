"""Rounds: what happens to a request when its draft has been judged or its target has stepped."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.payoff import OffSwitch
from sglang_parse.core.question import Question
from sglang_parse.core.request import Phase, RequestState
from sglang_parse.core.segment import segment_is_done
from sglang_parse.core.selection import matching_tokens, select_cut
from sglang_parse.core.simulation import ENV_VAR as SIMULATION
from sglang_parse.core.simulation import SimulatedAcceptance
from sglang_parse.engine.faults import NAN_IN_TARGET
from sglang_parse.engine.kv import is_stop_token, tokens_left
from sglang_parse.engine.readout import Readout, trace_record
from sglang_parse.engine.verify import VerifyRows, plan_questions
from sglang_parse.telemetry.metrics import process_tally

logger = logging.getLogger(__name__)

LOW_MASS = 0.5
"""Mean p(accept) + p(reject) of a pass below which the question is reported as not understood."""


class RoundJudge:
    """Turns a pass's readout into emitted tokens and the request's next phase."""

    def __init__(
        self, config: ParseConfig, tokenizer: Any, question: Question | None, switch: OffSwitch
    ) -> None:
        self.config = config
        self.switch = switch
        self.rule = config.segment_rule
        self.question = question
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}
        self._low_mass_reported = False
        self._simulated = _simulated_acceptance(config)

    def start(self, req: Any) -> None:
        """After a prefill: a draft, or the target's own first segment."""
        state: RequestState = req.parse_state
        if state.phase is Phase.DRAFTING:
            self._draft_again(req, len(state.output_ids))

    def _draft_again(self, req: Any, num_written: int) -> None:
        """Drafting may start; it does where it pays. Else the target writes one segment more."""
        state = req.parse_state
        if self.switch.should_draft(state.threshold):
            state.start_draft()
            return
        state.stats.skipped_drafts += 1
        state.segment_start = num_written
        state.continue_segment()

    def plan(self, req: Any) -> None:
        """Write the questions of a request's draft that is over."""
        state = req.parse_state
        if state.phase is not Phase.VERIFYING or self.question is None:
            return
        plan_questions(
            state.draft,
            [self._piece(token) for token in state.draft.token_ids],
            self.rule,
            self.question,
            self.config.max_prefixes,
            was_thinking=self._read_thinking(req, state),
        )

    def _read_thinking(self, req: Any, state: RequestState) -> bool:
        """Whether a think block is open behind the output so far; reads only what is new."""
        thinking = self.question.thinking if self.question else None
        if thinking is None:
            return False
        if not state.num_read:
            state.is_thinking = thinking.is_open_after(req.origin_input_ids)
        new = state.output_ids[state.num_read :]
        state.is_thinking = thinking.is_open_after(new, state.is_thinking)
        state.num_read = len(state.output_ids)
        return state.is_thinking

    def settle_round(self, req: Any, part: VerifyRows, readout: Readout) -> list[int]:
        """Judge one draft.

        Args:
            req: the request; its state moves to the next phase.
            part: its rows of the pass.
            readout: what the target says about them.

        Returns:
            The tokens to emit: the kept draft and, unless that ends the answer, the target's
            own next token.
        """
        state = req.parse_state
        if readout.is_faulty:
            state.fault = NAN_IN_TARGET
            return []
        self._watch_mass(readout)
        cut = self._cut(state, readout)
        next_token: int | None = readout.choices[part.cut_rows.index(cut)]
        if self._ends_answer(req, cut):
            next_token = None
        if state.keep_trace:
            state.trace.append(trace_record(state, readout, cut, next_token, self.question))
        tokens = state.draft.token_ids[:cut] + ([] if next_token is None else [next_token])
        process_tally().judged(len(state.draft.token_ids), cut, readout.verdicts)
        state.stats.rounds += 1
        state.stats.accepted_tokens += cut
        self.switch.saw_round(
            state.threshold, len(state.draft.token_ids), len(tokens), part.layout.num_rows
        )
        state.target_run = int(next_token is not None)
        self._after_round(req, part, cut, tokens)
        return tokens

    def _cut(self, state: RequestState, readout: Readout) -> int:
        """How many draft tokens are kept.

        In token mode the target's own choice at every place, greedy or sampled, decides: exact
        either way.
        """
        draft = state.draft
        if self.question is None:
            matched = matching_tokens(draft.token_ids, readout.choices)
            return 0 if state.threshold > 1 else matched
        if self._simulated and state.threshold <= 1:  # above 1 is exact, simulated or not
            return self._simulated.cut(len(draft.token_ids), draft.prefix_ends)
        return select_cut(
            readout.verdicts, draft.prefix_ends, state.threshold, self.config.selection
        )

    def _ends_answer(self, req: Any, cut: int) -> bool:
        """Whether the kept draft ends the answer: its end, or the request's length limit."""
        state: RequestState = req.parse_state
        draft = state.draft
        whole = draft.finished and cut == len(draft.token_ids)
        return whole or len(state.output_ids) + cut >= req.sampling_params.max_new_tokens

    def _after_round(self, req: Any, part: VerifyRows, cut: int, tokens: list[int]) -> None:
        state = req.parse_state
        committed = part.layout.prefix_len
        # The draft's KV is right up to its own kept tokens; the target's next token is new.
        state.draft_kv_len = min(state.draft_kv_len, committed + 1 + cut)
        rejected = cut < (state.draft.prefix_ends or [len(state.draft.token_ids)])[-1]
        state.segment_start = len(state.output_ids) + cut
        if rejected and self.config.after_cut == "target":
            state.continue_to_end()
        elif not rejected or self.question is None:
            self._draft_again(req, len(state.output_ids) + len(tokens))
        else:
            state.continue_segment()
            self._resume_if_done(req, tokens)

    def settle_proposal(self, req: Any, proposed: Sequence[int], readout: Readout) -> list[int]:
        """Keep what the target would have written itself of an EAGLE-3 head's proposal.

        Args:
            req: the request; its state moves to the next phase.
            proposed: token ids behind the last output token, as far as its pass went.
            readout: the target's own choices, [len(proposed) + 1].

        Returns:
            The tokens to emit, at least one: the kept ones and the target's next.
        """
        state = req.parse_state
        if readout.is_faulty:
            state.fault = NAN_IN_TARGET
            return []
        matched = matching_tokens(proposed, readout.choices)
        written = readout.choices[: matched + 1][: max(1, tokens_left(req))]
        kept = self.after_steps(req, written)
        state.stats.eagle3_steps += 1
        state.stats.eagle3_tokens += len(kept)
        return kept

    def after_steps(self, req: Any, tokens: Sequence[int]) -> list[int]:
        """The target wrote some tokens: let drafting resume when it may.

        Returns:
            Those before which nothing ends: neither the answer nor, if drafting resumes at its
            end, the segment.
        """
        state = req.parse_state
        kept: list[int] = []
        for token in tokens:
            kept.append(token)
            self._resume_if_done(req, kept)
            if state.phase is Phase.DRAFTING or is_stop_token(req, token):
                break
        state.target_run = len(kept)
        return kept

    def _resume_if_done(self, req: Any, new_tokens: list[int]) -> None:
        state = req.parse_state
        if state.phase is not Phase.CONTINUING or not state.resumes:
            return
        num_written = len(state.output_ids) + len(new_tokens)
        if self.question is None:
            self._draft_again(req, num_written)
            return
        written = [*state.output_ids[state.segment_start :], *new_tokens]
        behind_cut = max(0, state.segment_start - len(state.output_ids))
        pieces = [self._piece(token) for token in written[behind_cut:]]
        if segment_is_done(pieces, self.rule):
            self._draft_again(req, num_written)

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
        if mean < LOW_MASS:
            self._low_mass_reported = True
            logger.warning(
                "PARSE: the verdict tokens get only %.3f of the probability on average in one "
                "pass (below %.1f); verdicts mean little. Give --parse-question a wording and "
                "verdict tokens that fit this model.",
                mean,
                LOW_MASS,
            )


def _simulated_acceptance(config: ParseConfig) -> SimulatedAcceptance | None:
    """What ``simulation`` was asked for; never without saying so."""
    simulated = SimulatedAcceptance.from_env(config)
    if simulated is not None:
        process_tally().simulated = simulated.fraction
        logger.warning(
            "PARSE: acceptance is simulated (%s=%g): verdicts are computed and ignored, %.0f %% of "
            "every draft is kept. For benchmarks only: answers mean nothing.",
            SIMULATION,
            simulated.fraction,
            100 * simulated.fraction,
        )
    return simulated
