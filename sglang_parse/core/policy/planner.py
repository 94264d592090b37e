"""Finds the fastest draft plan from stage costs at the current load.

A round takes its draft iterations and its verify pass, and emits their tokens. Requests run in the
same iterations: drafting requests draft together, all others use one target forward. With n
requests that follow one plan, each spends known fractions of its iterations drafting and verifying,
which gives the mean iteration time and

    tokens/ms = n * emitted / (iterations per round * mean iteration time)

Context length and EAGLE-3 are not modelled: the measured stage costs include them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from sglang_parse.core.phases import DraftPlan
from sglang_parse.core.policy.acceptance import AcceptanceModel, ExpectedRound
from sglang_parse.core.policy.agreement import AfterReject
from sglang_parse.core.policy.limits import Limits
from sglang_parse.core.policy.stage_cost import StageCosts


class BatchLoad(NamedTuple):
    """Running requests.

    Attributes:
        num_drafting: requests that follow the plan, at least one.
        num_decoding: requests that only decode, whatever the plan.
    """

    num_drafting: int
    num_decoding: int = 0

    @property
    def total(self) -> int:
        return self.num_drafting + self.num_decoding


class PlanEstimate(NamedTuple):
    """Expected performance of a plan.

    Attributes:
        tokens_per_ms: output tokens of all running requests per ms.
        draft_latency_ms: duration of a request's draft and verify pass.
    """

    tokens_per_ms: float
    draft_latency_ms: float


@dataclass(frozen=True, slots=True)
class Planner:
    """Searches the candidate plans.

    Attributes:
        limits: candidate plans and bounds.
        costs: stage costs known so far.
    """

    limits: Limits
    costs: StageCosts

    def best(self, acceptance: AcceptanceModel, load: BatchLoad) -> DraftPlan:
        """Returns the fastest plan within the draft latency bound.

        If no plan meets the bound, returns the one with the lowest draft latency.
        """
        plans = {
            (length, prefixes, chunk): self._estimate(expected, after, chunk, load)
            for length, prefixes in self.limits.draft_candidates(acceptance.segment_len)
            for expected in (self._expect(acceptance, length, prefixes),)
            for after in (acceptance.after_reject(expected),)
            for chunk in self.limits.chunk_candidates(length)
        }
        bound = self.limits.max_draft_latency_ms or math.inf
        allowed = [plan for plan, found in plans.items() if found.draft_latency_ms <= bound]
        if allowed:
            best = max(allowed, key=lambda plan: plans[plan].tokens_per_ms)
        else:
            best = min(plans, key=lambda plan: plans[plan].draft_latency_ms)
        speedup = plans[best].tokens_per_ms / self._decode_tokens_per_ms(load.total)
        return DraftPlan(*best, speedup=speedup)

    def probe_loss_ms(
        self, acceptance: AcceptanceModel, plan: DraftPlan, num_running: int
    ) -> float:
        """Estimates the time lost if one request drafts and all wait for it; may be negative."""
        expected = self._expect(acceptance, plan.draft_tokens, plan.max_prefixes)
        loss = expected.num_drafted * (self.costs.draft_step.at(1) or 0.0)
        loss += self.costs.verify.at(self._verify_rows(expected)) or 0.0
        emitted = expected.num_accepted + expected.num_bonus
        emitted += expected.reject_prob * acceptance.after_reject(expected).num_matched
        # The request saves its fraction of the decode steps for the tokens it emits.
        steps = emitted / self.costs.tokens_per_step
        return loss - steps * (self.costs.decode.at(num_running) or 0.0) / num_running

    def _decode_tokens_per_ms(self, num_running: int) -> float:
        """Output rate without drafting."""
        ms = (self.costs.decode.at(num_running) or 0.0) + (
            self.costs.scheduler.at(num_running) or 0.0
        )
        return num_running * self.costs.tokens_per_step / max(1e-9, ms)

    def _estimate(
        self, expected: ExpectedRound, after: AfterReject, chunk: int, load: BatchLoad
    ) -> PlanEstimate:
        """Estimates a plan that all ``load.num_drafting`` requests follow."""
        # The error is still ahead after a reject. If prefixes are far apart, the next drafts are
        # rejected at their start until the target has passed it; it is uniform in the segment.
        advance, spacing = after.max_matched + 1, expected.prefix_spacing
        repeats = max(0.0, spacing - advance) ** 2 / (2 * spacing * advance)
        rounds = 1.0 if self.limits.every_token else 1 + expected.reject_prob * repeats
        rejects = 0.0 if self.limits.every_token else rounds - 1 + expected.reject_prob
        chunks = max(1.0, expected.num_drafted / chunk)
        chunk_len, rows = expected.num_drafted / chunks, self._verify_rows(expected)
        ms = self._iteration_ms(load, chunks / (chunks + 1), chunk_len, rows)
        emitted = expected.num_accepted + expected.num_bonus
        emitted += rejects * after.num_matched + rounds - 1
        emitted *= load.num_drafting / (rounds * (chunks + 1))
        emitted += load.num_decoding * self.costs.tokens_per_step
        return PlanEstimate(emitted / max(1e-9, ms), (chunks + 1) * ms)

    def _iteration_ms(
        self, load: BatchLoad, drafting: float, chunk_len: float, rows: float
    ) -> float:
        """Estimates the mean iteration time.

        Args:
            drafting: fraction of a request's iterations in which it drafts; it is verified in the
                others.
            chunk_len: draft tokens of one request per draft iteration.
            rows: rows of one draft in the verify pass.
        """
        costs, count, verifying = self.costs, load.num_drafting, 1 - drafting
        ms = costs.scheduler.at(load.total) or 0.0
        if not load.num_decoding:  # drafts that are ready wait for the others
            ms += drafting * chunk_len * (costs.draft_step.at(count) or 0.0)
            return ms + verifying * (costs.verify.at(count * rows) or 0.0)
        any_drafts, any_verify = 1 - verifying**count, 1 - drafting**count
        ms += any_drafts * chunk_len * (costs.draft_step.at(count * drafting / any_drafts) or 0.0)
        # Verify passes vary in their number of drafts, and cost is not linear in rows: average it
        # at one standard deviation below and above the mean.
        mean = count * verifying / any_verify
        spread = min(mean - 1, math.sqrt(count * verifying * (1 - verifying))) if mean > 1 else 0.0
        sizes = ((mean + side * spread) * rows + load.num_decoding for side in (-1, 1))
        ms += any_verify * sum(costs.verify.at(size) or 0.0 for size in sizes) / 2
        return ms + (1 - any_verify) * (costs.decode.at(load.num_decoding) or 0.0)

    def _expect(
        self, acceptance: AcceptanceModel, draft_tokens: int, max_prefixes: int
    ) -> ExpectedRound:
        return acceptance.expect(draft_tokens, max_prefixes, every_token=self.limits.every_token)

    def _verify_rows(self, expected: ExpectedRound) -> float:
        return 1 + expected.num_verified + expected.num_prefixes * self.limits.question_rows
