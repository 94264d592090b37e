"""The fastest plan for the drafts of one account, from the prices of the stages at this load.

A round costs its draft and its pass, then what the target writes after a cut; it yields what it
emits. Running requests share iterations: those that draft make a burst, the others share one
forward of the target. Of n requests that follow one plan, each spends a share of its iterations
drafting, one being judged and the rest continuing. So the mean iteration is known, and the rate:

    tokens/ms = n * emitted / (iterations of a round * mean time of an iteration)

Neither load, context length nor an EAGLE-3 head is modelled: all are in the prices. Numbers only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from sglang_parse.core.phases import DraftPlan
from sglang_parse.core.policy.acceptance import AcceptanceModel, Expected
from sglang_parse.core.policy.limits import Limits
from sglang_parse.core.policy.stage_cost import StageCosts


class Load(NamedTuple):
    """Requests that run.

    Attributes:
        active: those that are to make rounds, at least one.
        resting: those that do not draft, whatever is planned.
    """

    active: int
    resting: int = 0

    @property
    def total(self) -> int:
        return self.active + self.resting


class Pace(NamedTuple):
    """What a plan is expected to bring.

    Attributes:
        rate: output tokens per ms of all running requests together.
        draft_latency_ms: how long a request's draft and its pass take.
    """

    rate: float
    draft_latency_ms: float


class Shares(NamedTuple):
    """The iterations of a request that makes rounds.

    Attributes:
        drafting, judged: the shares of them that it spends so; it spends the others continuing.
    """

    drafting: float
    judged: float


@dataclass(frozen=True, slots=True)
class Planner:
    """Compares the plans there are.

    Attributes:
        limits: what there is to decide.
        costs: what stages take, as is known when a plan is asked for.
    """

    limits: Limits
    costs: StageCosts

    def best(self, cuts: AcceptanceModel, load: Load) -> DraftPlan:
        """For drafts that were cut so: the plan of the highest rate, of those that are not silent
        for too long; if all are, the one that is so for the shortest time."""
        plans = {
            (length, prefixes, burst): self._pace(cuts, expected, burst, load)
            for length, prefixes in self.limits.drafts(cuts.segment)
            for expected in (self._expect(cuts, length, prefixes),)
            for burst in self.limits.bursts()
        }
        most = self.limits.max_draft_latency_ms or math.inf
        allowed = [plan for plan, pace in plans.items() if pace.draft_latency_ms <= most]
        if allowed:
            best = max(allowed, key=lambda plan: plans[plan].rate)
        else:
            best = min(plans, key=lambda plan: plans[plan].draft_latency_ms)
        return DraftPlan(*best, speedup=plans[best].rate / self._plain_rate(load.total))

    def loss_ms(self, cuts: AcceptanceModel, plan: DraftPlan, num_running: int) -> float:
        """What is lost if one request drafts so and the others wait for it; below 0: it is won."""
        expected = self._expect(cuts, plan.draft_tokens, plan.max_prefixes)
        loss = expected.drafted * (self.costs.draft_step.at(1) or 0.0)
        loss += self.costs.verify.at(self._rows(expected)) or 0.0
        emitted = expected.kept + expected.own
        emitted += expected.reject_prob * cuts.behind(expected).matched
        # It saves its share of the steps for what it emits.
        steps = emitted / self.costs.tokens_per_step
        return loss - steps * (self.costs.decode.at(num_running) or 0.0) / num_running

    def _plain_rate(self, num_running: int) -> float:
        """Where nobody drafts."""
        ms = (self.costs.decode.at(num_running) or 0.0) + (
            self.costs.scheduler.at(num_running) or 0.0
        )
        return num_running * self.costs.tokens_per_step / max(1e-9, ms)

    def _pace(self, cuts: AcceptanceModel, expected: Expected, burst: int, load: Load) -> Pace:
        """Of all running requests, if such are the rounds of all that do not rest."""
        behind = cuts.behind(expected)
        # Behind a cut the wrong token is still ahead. Where prefixes end far apart, the next drafts
        # are cut at their start until the target has come there: from anywhere in the stretch.
        advance = behind.reach + behind.written
        again = max(0.0, expected.spacing - advance) ** 2 / (2 * expected.spacing * advance)
        rounds = 1.0 if self.limits.by_token else 1 + expected.reject_prob * again
        num_cuts = 0.0 if self.limits.by_token else rounds - 1 + expected.reject_prob
        bursts = max(1.0, expected.drafted / burst)
        steps = num_cuts * behind.written / self.costs.tokens_per_step
        iterations = rounds * (bursts + 1) + steps
        shares = Shares(rounds * bursts / iterations, rounds / iterations)
        ms = self._iteration_ms(load, shares, expected.drafted / bursts, self._rows(expected))
        emitted = expected.kept + expected.own + num_cuts * (behind.matched + behind.written)
        emitted *= load.active / iterations
        emitted += load.resting * self.costs.tokens_per_step
        return Pace(emitted / max(1e-9, ms), (bursts + 1) * ms)

    def _iteration_ms(self, load: Load, shares: Shares, burst: float, rows: float) -> float:
        """The mean iteration.

        Args:
            burst: steps of a burst; ``rows``: of one draft's pass.
        """
        costs, count, (drafting, judged) = self.costs, load.active, shares
        anyone_drafts, anyone_judged = 1 - (1 - drafting) ** count, 1 - (1 - judged) ** count
        only_bursts = 0.0 if load.resting else drafting**count
        only_steps = max(0.0, (1 - judged) ** count - only_bursts)
        stepping = count * (1 - drafting - judged) + load.resting
        ms = costs.scheduler.at(load.total) or 0.0
        ms += anyone_drafts * burst * (costs.draft_step.at(count * drafting / anyone_drafts) or 0.0)
        # Passes differ in how many drafts they judge, and the price bends: as dear as two of them,
        # one standard deviation smaller and larger.
        mean = count * judged / anyone_judged
        spread = min(mean - 1, math.sqrt(count * judged * (1 - judged))) if mean > 1 else 0.0
        sizes = ((mean + side * spread) * rows + stepping for side in (-1, 1))
        ms += anyone_judged * sum(costs.verify.at(size) or 0.0 for size in sizes) / 2
        return ms + only_steps * (costs.decode.at(max(1.0, stepping)) or 0.0)

    def _expect(self, cuts: AcceptanceModel, draft_tokens: int, max_prefixes: int) -> Expected:
        return cuts.expect(draft_tokens, max_prefixes, by_token=self.limits.by_token)

    def _rows(self, expected: Expected) -> float:
        return 1 + expected.judged + expected.prefixes * self.limits.question_rows
