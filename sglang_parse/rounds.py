"""Rounds: what happens to a request when its draft has been judged or its target has stepped."""

from __future__ import annotations

import logging
from typing import Any

import torch

from sglang_parse.config import ParseConfig
from sglang_parse.faults import nan_rows
from sglang_parse.phases import Phase, RequestState
from sglang_parse.question import Question
from sglang_parse.sampling import RowSampler
from sglang_parse.segment import segment_is_done
from sglang_parse.selection import matching_tokens, select_cut
from sglang_parse.verify import (
    Verdicts,
    VerifyRows,
    plan_questions,
    read_verdicts,
    trace_record,
)

logger = logging.getLogger(__name__)

LOW_MASS = 0.5
"""Mean p(accept) + p(reject) of a pass below which the question is reported as not understood."""


class RoundJudge:
    """Turns a pass's logits into emitted tokens and the request's next phase."""

    def __init__(self, config: ParseConfig, tokenizer: Any, question: Question | None) -> None:
        self.config = config
        self.rule = config.segment_rule
        self.question = question
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}
        self._low_mass_reported = False

    def plan(self, state: RequestState) -> None:
        """Write the questions of a draft that is over."""
        if state.phase is Phase.VERIFYING and self.question is not None:
            pieces = [self._piece(token) for token in state.draft.token_ids]
            plan_questions(state.draft, pieces, self.rule, self.question, self.config.max_prefixes)

    def settle_round(
        self, req: Any, part: VerifyRows, logits: torch.Tensor, sampler: RowSampler
    ) -> list[int]:
        """Judge one draft.

        Args:
            req: the request; its state moves to the next phase.
            part: its rows of the pass.
            logits: [len(part.logits_rows), vocab].
            sampler: the target's sampler over the scheduler's batch.

        Returns:
            The tokens to emit: the kept draft and, unless that ends the answer, the target's
            own next token.
        """
        state = req.parse_state
        if any(nan_rows(logits)):
            state.fault = "NaN in the target model's logits"
            return []
        next_token: int | None
        if self.question is None:
            verdicts = Verdicts([], [])
            cut, next_token = self._token_cut(req, part, logits, sampler)
        else:
            verdicts = read_verdicts(logits[part.num_cut_rows :], self.question)
            self._watch_mass(verdicts)
            cut, next_token = self._semantic_cut(req, part, logits, verdicts, sampler)
        if self._ends_answer(req, cut):
            next_token = None
        if state.keep_trace:
            state.trace.append(
                trace_record(state, verdicts, cut, next_token, self.question, len(req.output_ids))
            )
        tokens = state.draft.token_ids[:cut] + ([] if next_token is None else [next_token])
        state.stats.rounds += 1
        state.stats.accepted_tokens += cut
        state.target_wrote_last = next_token is not None
        self._after_round(req, part, cut, tokens)
        return tokens

    def _semantic_cut(
        self,
        req: Any,
        part: VerifyRows,
        logits: torch.Tensor,
        verdicts: Verdicts,
        sampler: RowSampler,
    ) -> tuple[int, int | None]:
        draft = req.parse_state.draft
        cut = select_cut(
            verdicts.accept, draft.prefix_ends, req.parse_state.threshold, self.config.selection
        )
        if self._ends_answer(req, cut):
            return cut, None
        place = part.logits_rows.index(cut)
        return cut, self._sample(part, logits[place : place + 1], [cut], sampler)[0]

    def _token_cut(
        self, req: Any, part: VerifyRows, logits: torch.Tensor, sampler: RowSampler
    ) -> tuple[int, int]:
        """The target's own choice at every place, greedy or sampled, decides: exact either way."""
        draft = req.parse_state.draft.token_ids
        choice = self._sample(part, logits, list(part.logits_rows), sampler)
        cut = 0 if req.parse_state.threshold > 1 else matching_tokens(draft, choice)
        return cut, choice[cut]

    def _sample(
        self, part: VerifyRows, logits: torch.Tensor, cuts: list[int], sampler: RowSampler
    ) -> list[int]:
        positions = torch.tensor(
            [part.layout.prefix_len + cut for cut in cuts], device=logits.device
        )
        tokens, _ = sampler.sample(logits, [part.row] * len(cuts), positions)
        return tokens.tolist()

    def _ends_answer(self, req: Any, cut: int) -> bool:
        """Whether the kept draft ends the answer: its end, or the request's length limit."""
        draft = req.parse_state.draft
        whole = draft.finished and cut == len(draft.token_ids)
        return whole or len(req.output_ids) + cut >= req.sampling_params.max_new_tokens

    def _after_round(self, req: Any, part: VerifyRows, cut: int, tokens: list[int]) -> None:
        state = req.parse_state
        committed = part.layout.prefix_len
        # The draft's KV is right up to its own kept tokens; the target's next token is new.
        state.draft_kv_len = min(state.draft_kv_len, committed + 1 + cut)
        rejected = cut < (state.draft.prefix_ends or [len(state.draft.token_ids)])[-1]
        state.segment_start = len(req.output_ids) + cut
        if not rejected:
            state.start_draft()
        elif self.config.after_cut == "target":
            state.continue_to_end()
        elif self.question is None:
            state.start_draft()
        else:
            state.continue_segment()
            self._resume_if_done(req, tokens)

    def after_step(self, req: Any, token: int) -> None:
        """The target wrote one token: let drafting resume when it may."""
        req.parse_state.target_wrote_last = True
        self._resume_if_done(req, [token])

    def _resume_if_done(self, req: Any, new_tokens: list[int]) -> None:
        state = req.parse_state
        if state.phase is not Phase.CONTINUING or not state.resumes:
            return
        if self.question is None:
            state.start_draft()
            return
        written = [*req.output_ids[state.segment_start :], *new_tokens]
        behind_cut = max(0, state.segment_start - len(req.output_ids))
        pieces = [self._piece(token) for token in written[behind_cut:]]
        if segment_is_done(pieces, self.rule):
            state.start_draft()

    def _piece(self, token_id: int) -> str:
        if token_id not in self._pieces:
            self._pieces[token_id] = self._tokenizer.decode([token_id])
        return self._pieces[token_id]

    def _watch_mass(self, verdicts: Verdicts) -> None:
        """Say once that the target does not answer the question with the verdict tokens."""
        if self._low_mass_reported or not verdicts.mass:
            return
        mean = sum(verdicts.mass) / len(verdicts.mass)
        if mean < LOW_MASS:
            self._low_mass_reported = True
            logger.warning(
                "PARSE: the verdict tokens get only %.3f of the probability on average in one "
                "pass (below %.1f); verdicts mean little. Give --parse-question a wording and "
                "verdict tokens that fit this model.",
                mean,
                LOW_MASS,
            )
