"""Verdicts: what a verify pass needs for them, and how they are read from it.

A verdict is a number per prefix of a draft. Everything that depends on where it comes from, a
question or a verdict head (``head``), is here: the rows that a verify pass needs for it, reading
it from the forward, and watching whether it can be trusted. The rest of the engine sees prefix ends
and numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.counters import Counters
from sglang_parse.core.phases import Phase
from sglang_parse.core.question import LOW_VERDICT_MASS, Question
from sglang_parse.core.request import RequestState
from sglang_parse.core.rival import Rival
from sglang_parse.core.round import Round, Verdicts
from sglang_parse.core.segment import Segmenter, evenly_spaced, prefix_ends
from sglang_parse.core.selection import contradicts_target, matched_prefixes, matching_tokens
from sglang_parse.core.strict import Refusal, find_refusal
from sglang_parse.engine.judge.scorer import CapturedLayers, Scorer
from sglang_parse.engine.logits.grammar import free_ends
from sglang_parse.engine.requests import completes_answer, is_greedy
from sglang_parse.engine.sglang_types import Req
from sglang_parse.telemetry.drift import DriftWatch

logger = logging.getLogger(__name__)

WINDOW = 16
"""Matched prefixes after which the rejected ones are reported, if they are many."""


class Judge:
    """Gives verdicts on the prefixes of a draft, by a question, a verdict head, or both: then the
    question is about complete answers, and the head decides everything else.

    Args:
        question: the rendered question, if one is asked.
        scorer: the likelihood or a trained verdict head, if there is one.
        captured: the target's layers that verify passes capture, if any.
        drift: compares verdicts with the certificate's, or the head's training set's.
    """

    def __init__(
        self,
        config: ParseConfig,
        question: Question | None,
        scorer: Scorer | None,
        segments: Segmenter,
        counters: Counters,
        captured: CapturedLayers | None = None,
        drift: DriftWatch | None = None,
    ) -> None:
        self.name, self.max_prefixes = config.judge_name, config.max_prefixes
        self.threshold = config.accept_threshold
        self.question, self.scorer, self.segments = question, scorer, segments
        self.captured, self.counters, self.drift = captured, counters, drift
        self._num_matched = self._num_rejected = 0
        self._rival = Rival()
        self._reported: set[str] = set()

    @property
    def leaves_segments(self) -> bool:
        """Whether a rejected segment is left to the target: where a question has no verdict before
        the segment's end, another draft of the rest would be judged by the same question."""
        return self.scorer is None and self.segments.rule.kind != "tokens"

    def ask(self, req: Req) -> None:
        """Chooses the prefixes of a complete draft, and the questions about them."""
        state = req.parse_state
        if state.phase is not Phase.VERIFYING:
            return
        draft, pieces = state.draft, self.segments.pieces(state.draft.token_ids)
        all_ends = prefix_ends(
            pieces,
            self.segments.rule,
            finished=completes_answer(req, state.num_drafted),
            max_prefixes=len(pieces),
        )
        all_ends = free_ends(state, draft.token_ids, all_ends)
        max_prefixes = state.plan.max_prefixes if state.plan else self.max_prefixes
        ends = all_ends if self.scorer else evenly_spaced(all_ends, max_prefixes)
        was_thinking = self._is_thinking(req)
        ids: list[tuple[int, ...]] = []
        for end in ends:
            complete = draft.finished and end == state.num_drafted
            if self.question is None or (self.scorer and not complete):
                ids.append(())
                continue
            asked = self.question.ids_for(
                draft.token_ids[:end],
                complete=complete,
                was_thinking=was_thinking,
                ends_line=pieces[end - 1].endswith("\n"),
            )
            ids.append(asked)
        state.ask(ends, ids, was_thinking=was_thinking)

    def answers(self, logits: torch.Tensor) -> torch.Tensor:
        """float32 [n, 2] verdict and mass, from logits [n, vocab] of the questions' last rows."""
        assert self.question is not None
        accept_id, reject_id = self.question.accept_id, self.question.reject_id
        # Column by column: indexing with a list would wait for the device.
        pair = torch.stack([logits[:, accept_id], logits[:, reject_id]], -1).float()
        mass = torch.exp(pair.logsumexp(-1) - logits.float().logsumexp(-1))
        return torch.stack([pair.softmax(-1)[:, 0], mass], dim=-1)

    def verdicts(
        self,
        state: RequestState,
        scores: Sequence[Sequence[float]],
        answers: Sequence[Sequence[float]],
        target_tokens: Sequence[int],
    ) -> Verdicts:
        """Verdicts on the prefixes of a request's draft.

        Args:
            scores: ``Scorer.scores`` of the anchor and the verified tokens.
            answers: verdict and mass of each question.
            target_tokens: the target's choice after each token; under sampling, the drawn one.
        """
        draft = state.draft
        ends = draft.prefix_ends
        values = self.scorer.verdicts(scores, ends) if self.scorer and ends else [0.0] * len(ends)
        mass: list[float | None] = [None] * len(ends)
        asked = (place for place, ids in enumerate(draft.question_ids) if ids)
        for place, answer in zip(asked, answers, strict=True):
            values[place], mass[place] = answer
        return Verdicts(values, mass, self._refusal(state, values, target_tokens))

    def _refusal(
        self, state: RequestState, values: Sequence[float], target_tokens: Sequence[int]
    ) -> Refusal | None:
        """The first draft token that a strict class refuses, as far as verdicts accept."""
        policy, checked = state.policy, state.draft.verified_ids
        if not policy.strict:
            return None
        if not policy.keep_trace:  # a trace tells what other thresholds would accept, too
            pairs = zip(state.draft.prefix_ends, values, strict=True)
            checked = checked[: max((n for n, v in pairs if v >= policy.threshold), default=0)]
        tokens = state.output_ids, checked, target_tokens
        return find_refusal(*tokens, policy.strict, self.segments.text_of, state.notes.code)

    def observe(self, req: Req, one: Round) -> None:
        """Watches the verdicts on a draft."""
        state, verdicts = req.parse_state, one.verdicts
        self._watch_mass(verdicts.mass)
        if self.drift is not None and not state.notes.telemetry.stats.rounds:
            if self.drift.add(verdicts.values):
                self.counters.count("drifted_windows_total")
            self.counters.verdict_drift = self.drift.distance
        threshold, refusal = state.policy.threshold, verdicts.refusal
        if one.rule is None or state.policy.rejects_all:
            return
        if refusal and refusal.place < (one.reject_end or 0):
            self.counters.count("strict_refusals_total", label_value=refusal.name)
            counts = state.notes.telemetry.strict_refusals
            counts[refusal.name] = counts.get(refusal.name, 0) + 1
        if is_greedy(req):
            num_matched = matching_tokens(one.draft.token_ids, one.target_tokens)
            matched, rejected = matched_prefixes(
                one.draft.prefix_ends, verdicts.values, threshold, num_matched
            )
            state.notes.telemetry.stats.matched_prefixes += matched
            state.notes.telemetry.stats.rejected_matched_prefixes += rejected
            if threshold == self.threshold:  # a request's own says nothing about the server's
                self._watch_matched(matched, rejected)
                self._watch_rival(one, num_matched)

    def note_step(self, state: RequestState) -> None:
        """The target decodes a token of a rejected segment."""
        self._rival.steps += state.policy.threshold == self.threshold

    # -- helpers ----------------------------------------------------------------

    def _is_thinking(self, req: Req) -> bool:
        """Whether a think block is open after the output; scans only what is new."""
        state, thinking = req.parse_state, self.question.thinking if self.question else None
        if thinking is None:
            return False
        before = state.notes.is_thinking
        if not state.notes.num_scanned:
            before = thinking.is_open_after(req.origin_input_ids)
        return thinking.is_open_after(state.output_ids[state.notes.num_scanned :], before)

    def _watch_mass(self, verdict_mass: Sequence[float | None]) -> None:
        """Warns if the target does not answer the question with the verdict tokens."""
        asked = [mass for mass in verdict_mass if mass is not None]
        mean = sum(asked) / len(asked) if asked else 1.0
        if mean < LOW_VERDICT_MASS:
            self._warn_once(
                "PARSE: the verdict tokens get only %.3f of the probability on average in one "
                "verify pass (below %.1f), so verdicts mean little. Fix: give --parse-question a "
                "wording that this model answers with the verdict words, or another pair of words "
                "(such as Yes and No), and take --parse-threshold from sglang-parse calibrate.",
                mean,
                LOW_VERDICT_MASS,
            )

    def _watch_matched(self, num_matched: int, num_rejected: int) -> None:
        """Warns if verdicts reject what the target would have written itself."""
        self._num_matched += num_matched
        self._num_rejected += num_rejected
        matched, rejected = self._num_matched, self._num_rejected
        if matched < WINDOW:
            return
        if contradicts_target(matched, rejected):
            self._warn_once(
                "PARSE: the %s does not work for this model: %d of %d prefixes (%.0f %%) "
                "that the target would have written itself, token for token, got a verdict below "
                "the threshold and were rejected. Fix: use --parse-judge likelihood, or a head of "
                "sglang-parse train-judge; choose another --parse-question or --parse-threshold "
                "with sglang-parse calibrate; or compare tokens instead with --parse-verification "
                "token.",
                self.name,
                rejected,
                matched,
                100 * rejected / matched,
            )
        self._num_matched = self._num_rejected = 0

    def _watch_rival(self, one: Round, num_matched: int) -> None:
        """Warns if the exact token check would be faster on this traffic."""
        rival = self._rival
        rival.add(one.num_output + 1, num_matched + 1, is_rejected=one.is_rejected)
        if not rival.is_complete:
            return
        if rival.wins:
            rejections = max(rival.rejections, 1)
            self._warn_once(
                "PARSE: the exact token check would be faster here than the %s: a refusal every "
                "%.0f tokens costs %.1f decode steps, so a target forward outputs %.1f tokens, "
                "where --parse-verification token would output %.1f of the same drafts. Fix: "
                "--parse-verification token; or verdicts on every token (--parse-judge likelihood "
                "or a head, without --parse-segment), whose refusals cost no step.",
                self.name,
                rival.tokens / rejections,
                rival.steps / rejections,
                rival.per_forward,
                rival.exact_per_forward,
            )
        self._rival = Rival()

    def _warn_once(self, text: str, *values: object) -> None:
        if text not in self._reported:
            self._reported.add(text)
            logger.warning(text, *values)
