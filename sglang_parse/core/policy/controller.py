"""Decides whether to draft, how many tokens, at how many prefixes to verify, in which chunks.

The planner's fastest plan is used if it beats plain decoding at the current load. Its inputs are
measured: recent stage times (``stage_cost``) and, per threshold, recent acceptance (``acceptance``,
``agreement``).

An unknown threshold starts from its neighbours' acceptance, or with a few short cold-start probes,
one at a time. While drafting is suspended, one request re-probes now and then. Nothing here reads a
clock: the same observations give the same decisions on every tensor-parallel rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from sglang_parse.core.phases import DraftPlan
from sglang_parse.core.policy.acceptance import VerifyOutcome
from sglang_parse.core.policy.eagle_gate import EagleGate
from sglang_parse.core.policy.limits import Limits
from sglang_parse.core.policy.planner import BatchLoad, Planner
from sglang_parse.core.policy.stage_cost import Stage, StageCosts, StageTime
from sglang_parse.core.policy.threshold_stats import (
    COLD_START_PROBES,
    StatsByThreshold,
    StatsKey,
    ThresholdStats,
    stats_key,
)

COLD_START_TOKENS = 16
"""Draft tokens of a probe."""
FORCED_TOKENS = 32
"""Draft tokens where no speedup is expected and the request asks for drafts all the same: rejected
drafts of full length would take minutes."""
WARMUP_ROUNDS = 32
"""Rounds of a threshold after each of which the plans are searched again."""
SEARCH_EVERY = 12
"""Queries between plan searches, or the number of running requests if larger."""
SEARCH_MS = 500.0
"""Stage time between plan searches: a search takes milliseconds, and suspended requests query at
every token."""
LOADS_PER_OCTAVE = 2
"""Resolution of the number of running requests for cached plans."""
PROBE_TIMEOUT = 12
"""Queries per running request during a cold-start probe before another is sent: the request may
have been aborted."""
REPROBE_FRACTION = 0.005
"""Fraction of decode time that re-probes may lose."""
INITIAL_BOOST = 16.0
"""Factor on a server's first re-probe budget, halved with each re-probe, if drafting was suspended
within ``WARMUP_ROUNDS``: those rounds may have compiled kernels or hit a busy machine."""
MIN_DECODE_AGE, MAX_DECODE_AGE = 8, 256
"""Drafts after which the decode cost is measured again, if no request decoded meanwhile: doubles
from the minimum to the maximum."""
CLEAR_SPEEDUP, CLEAR_FACTOR = 1.5, 8
"""Expected speedup from which the decode cost may be this many times as old: all requests that
query during the measurement decode a token without a draft."""
SUSPEND_SPEEDUP, RESUME_SPEEDUP = 1.05, 1.1
"""Expected speedups below which drafting is suspended and from which it resumes. Expectation
exceeded reality by 4 to 6 % where drafting about broke even (simulated acceptance 0.1 and 0.3)."""

EXTRA_PER_ROW = 1 / 32
"""Cost of one more row in a forward before costs are known, in decode steps."""
DRAFTING_OFF = "drafting is off (--parse-drafting never)"


@dataclass(slots=True)
class Controller:
    """One per server; every tensor-parallel rank feeds its own with rank 0's times.

    Attributes:
        limits: candidate plans and bounds.
        mode: "auto" decides; "always" and "never" follow ``limits`` or never draft.
        num_running: running requests, including the one that queries.
        last_plan: None before the first plan.
        no_draft_reason: why ``plan`` returned None the last time.
        speedup: last expected speedup of drafting; None until stage costs are known.
        eagle_gate: decides whether the EAGLE-3 head runs for a request.
    """

    limits: Limits = field(default_factory=Limits)
    mode: str = "auto"
    num_running: int = 1
    last_plan: DraftPlan | None = None
    no_draft_reason: str = ""
    speedup: float | None = None
    eagle_gate: EagleGate = field(default_factory=EagleGate)
    _costs: StageCosts = field(default_factory=StageCosts)
    _not_drafting: Counter[StatsKey | None] = field(default_factory=Counter)
    _stats: StatsByThreshold = field(default_factory=StatsByThreshold)
    _drafts_since_decode: int = 0
    _max_decode_age: int = MIN_DECODE_AGE
    _has_plain: bool = False
    _reprobe_boost: float = INITIAL_BOOST
    _fairness_debt_ms: float = 0.0
    _observed_ms: float = 0.0

    @property
    def is_adaptive(self) -> bool:
        """Whether observed stage times decide anything."""
        return self.mode == "auto"

    # -- observations -----------------------------------------------------------

    def observe_load(self, num_running: int, not_drafting: Iterable[StatsKey | None] = ()) -> None:
        """Records the running requests.

        Args:
            not_drafting: for each request that does not draft, its key if drafting is suspended for
                it, or None if it never drafts. These requests wait for others' drafts all the same.
        """
        self.num_running, self._not_drafting = num_running, Counter(not_drafting)

    def observe(self, iteration: Sequence[StageTime]) -> None:
        """Records the stage times of one iteration."""
        self._observed_ms += sum(timed.ms for timed in iteration)
        self._update_fairness_debt(
            sum(timed.ms for timed in iteration if timed.stage is not Stage.SCHEDULER)
        )
        for timed in iteration:
            self._costs.observe(timed)
            if timed.stage is Stage.DRAFT_PREFILL:
                self._charge_draft_prefill(timed)
            elif timed.stage is Stage.DECODE:
                self._observe_decode(timed)

    def _charge_draft_prefill(self, timed: StageTime) -> None:
        """Draft prefill of a re-probe is part of what it loses."""
        for key in timed.stats_keys:
            stats = self._stats.peek(key)
            if stats is not None and stats.is_suspended:
                stats.probe_budget_ms -= timed.ms / len(timed.stats_keys)

    def observe_prefill(self, ms: float, num_eagle_tokens: int = 0, eagle_ms: float = 0.0) -> None:
        """Records a prefill of requests that may draft.

        It adds to the fairness debt: drafting requests finish sooner, so they cause prefills more
        often than plain ones would.

        Args:
            num_eagle_tokens: prompt tokens that the EAGLE-3 head processed, in ``eagle_ms``.
        """
        if num_eagle_tokens:
            self.eagle_gate.observe_cost(num_eagle_tokens, eagle_ms)
        if self._has_plain and self.limits.max_slowdown:
            self._fairness_debt_ms += ms

    def _update_fairness_debt(self, ms: float) -> None:
        """Adds the time by which an iteration exceeded ``max_slowdown`` decode steps."""
        step_ms = self._costs.decode.at(self.num_running)
        if not self._has_plain or not self.limits.max_slowdown or step_ms is None:
            self._fairness_debt_ms = 0.0
        else:
            excess_ms = ms - self.limits.max_slowdown * step_ms
            self._fairness_debt_ms = max(0.0, self._fairness_debt_ms + excess_ms)

    def _observe_decode(self, timed: StageTime) -> None:
        if self._drafts_since_decode > self._max_decode_age:
            self._max_decode_age = min(2 * self._max_decode_age, MAX_DECODE_AGE)
        self._drafts_since_decode = 0
        # All suspended thresholds of running requests share one re-probe budget.
        found = (self._stats.peek(key) for key in self._not_drafting if key is not None)
        suspended = [stats for stats in found if stats is not None and stats.is_suspended]
        for stats in suspended:
            boost = self._reprobe_boost if stats.acceptance.num_rounds < WARMUP_ROUNDS else 1.0
            stats.probe_budget_ms += boost * REPROBE_FRACTION * timed.ms / len(suspended)

    def observe_round(
        self, threshold: float, outcome: VerifyOutcome, num_failed: int = 0, adapter: str = ""
    ) -> None:
        """Records a verified draft; ``num_failed`` and ``adapter`` as in ``plan``."""
        stats = self._stats.get(stats_key(threshold, num_failed, adapter))
        stats.num_waiting, stats.cold_start_probes = None, max(0, stats.cold_start_probes - 1)
        stats.acceptance.observe_round(outcome, self.num_running)

    # -- rounds -----------------------------------------------------------------

    @property
    def draft_chunk(self) -> int:
        """Maximum draft tokens per iteration."""
        return self.last_plan.draft_chunk if self.last_plan else self.limits.initial_chunk

    def plan(
        self, threshold: float, num_failed: int = 0, adapter: str = "", *, always: bool = False
    ) -> DraftPlan | None:
        """Plans the next draft of a request; None if it should decode instead, for
        ``no_draft_reason``.

        A returned probe counts as sent, so call this once per draft.

        Args:
            num_failed: consecutive failed drafts of this request so far.
            adapter: the request's LoRA adapter; "" for none.
            always: the request asks for drafts whatever the expected speedup.
        """
        plan = self._plan(threshold, num_failed, adapter)
        if plan is None and always:
            plan = self._probe_plan(FORCED_TOKENS)
        self.last_plan = plan or self.last_plan
        return plan

    def _plan(self, threshold: float, num_failed: int, adapter: str) -> DraftPlan | None:
        if self.mode == "always":
            return self._full_plan()
        if self.mode != "auto":
            return self._no_draft(DRAFTING_OFF)
        if threshold > 1:
            return self._no_draft("a threshold above 1 accepts no draft")
        key = stats_key(threshold, num_failed, adapter)
        stats = self._stats.get(key)
        if stats.cold_start_probes == COLD_START_PROBES:
            return self._cold_start_probe(stats)
        if self._needs_decode_cost():
            return self._no_draft("plain decoding is being timed, to compare drafting with it")
        best = self._best_plan(stats, self._not_drafting.total() - self._not_drafting[key])
        self.speedup = best.speedup
        required = RESUME_SPEEDUP if stats.is_suspended else SUSPEND_SPEEDUP
        stats.is_suspended = (best.speedup or 0.0) < required
        if not stats.is_suspended:
            return best
        if stats.cold_start_probes:
            return self._cold_start_probe(stats)
        return self._reprobe(stats) or self._no_draft(
            f"drafting suspended: expected speedup {best.speedup or 0.0:.2f}, below {required}"
        )

    def _no_draft(self, reason: str) -> DraftPlan | None:
        self.no_draft_reason = reason
        return None

    def _needs_decode_cost(self) -> bool:
        """Counts a draft and decides whether to decode instead, to measure the decode cost."""
        self._drafts_since_decode += 1
        is_clear = (self.speedup or 0.0) >= CLEAR_SPEEDUP
        max_age = self._max_decode_age * (CLEAR_FACTOR if is_clear else 1)
        return self._costs.decode.at(1) is None or self._drafts_since_decode > max_age

    def _cold_start_probe(self, stats: ThresholdStats) -> DraftPlan | None:
        """Sends a probe unless one is in flight."""
        timeout = PROBE_TIMEOUT * self.num_running
        if stats.num_waiting is not None and stats.num_waiting < timeout:
            stats.num_waiting += 1
            return self._no_draft("drafting not yet tried: another request's probe is running")
        stats.num_waiting = 0
        return self._probe_plan()

    def _reprobe(self, stats: ThresholdStats) -> DraftPlan | None:
        """Sends a probe if its expected loss is within the budget."""
        plan = self._probe_plan()
        loss = Planner(self.limits, self._costs).probe_loss_ms(
            stats.acceptance, plan, self.num_running
        )
        if stats.probe_budget_ms < max(loss, 0.0):
            return None
        stats.probe_budget_ms = 0.0
        self._reprobe_boost = max(1.0, self._reprobe_boost / 2)
        return plan

    def _full_plan(self) -> DraftPlan:
        limits = self.limits
        return DraftPlan(limits.draft_tokens, limits.max_prefixes, limits.initial_chunk)

    def _probe_plan(self, draft_tokens: int = COLD_START_TOKENS) -> DraftPlan:
        plan = self._full_plan()
        if "draft_tokens" in self.limits.fixed:
            return plan
        return replace(plan, draft_tokens=min(draft_tokens, plan.draft_tokens))

    def _best_plan(self, stats: ThresholdStats, num_decoding: int) -> DraftPlan:
        """Returns the best plan, from the last search unless load or statistics have changed.

        Args:
            num_decoding: requests that do not draft for another reason than this threshold.
        """
        load = round(LOADS_PER_OCTAVE * math.log2(self.num_running))
        stats.num_queries += 1
        rounds = stats.acceptance.num_rounds
        is_new = rounds < WARMUP_ROUNDS and rounds != stats.search_rounds
        is_old = stats.num_queries >= max(SEARCH_EVERY, self.num_running)
        is_old = is_old and self._observed_ms - stats.search_ms >= SEARCH_MS
        if stats.best_plan is None or is_new or is_old or load != stats.search_load:
            num_decoding = min(num_decoding, self.num_running - 1)
            batch_load = BatchLoad(self.num_running - num_decoding, num_decoding)
            stats.best_plan = Planner(self.limits, self._costs).best(stats.acceptance, batch_load)
            stats.num_queries, stats.search_load = 0, load
            stats.search_rounds, stats.search_ms = rounds, self._observed_ms
        return stats.best_plan

    def extra_cost(self, num_rows: int) -> float:
        """Cost of verifying a draft of one request, in ``num_rows`` rows, instead of a decode step
        of it: in tokens that the running requests decode in that time. 0 unless adaptive."""
        if not self.is_adaptive:
            return 0.0
        step_ms = self._costs.decode.at(self.num_running)
        pass_ms = self._costs.verify.at(self.num_running - 1 + num_rows)
        if not step_ms or pass_ms is None:
            return EXTRA_PER_ROW * num_rows
        return self.tokens_in(max(0.0, pass_ms - step_ms))

    def tokens_in(self, ms: float) -> float:
        """Tokens that the running requests decode in that time; 0 unless adaptive."""
        return self.steps_in(ms) * self.num_running * self._costs.tokens_per_step

    def steps_in(self, ms: float) -> float:
        """Decode steps that a request misses while it waits; 0 unless adaptive."""
        step_ms = self._costs.decode.at(self.num_running) if self.is_adaptive else None
        return ms / step_ms if step_ms else 0.0

    # -- requests ---------------------------------------------------------------

    def uses_eagle(self, threshold: float) -> bool:
        """Decides whether the EAGLE-3 head runs for a new request that may draft."""
        step_ms = self._costs.decode.at(self.num_running)
        if self.mode != "auto" or step_ms is None:
            return True
        tokens_per_step = self.num_running * self._costs.tokens_per_step
        return self.eagle_gate.pays(threshold, step_ms / tokens_per_step)

    # -- iterations -------------------------------------------------------------

    def limit_iteration(
        self,
        num_drafting: int,
        verify_rows: Sequence[int],
        num_decoding: int,
        num_plain: int = 0,
        *,
        may_join: bool = False,
    ) -> tuple[int, int]:
        """Limits the work of the next iteration to keep the latency bounds.

        If no request decodes, nothing is limited; but drafts that are ready wait if the others may
        join their verify pass, because two alternating halves need twice as many forwards. Else the
        iteration is limited to ``limits.max_itl_ratio`` decode steps, with at least one draft token
        and one draft, and to nothing while plain requests have a fairness debt.

        Args:
            num_drafting: drafting requests.
            verify_rows: rows of each draft that is ready for verification, longest waiting first.
            num_decoding: requests that decode.
            num_plain: decoding requests that never draft.
            may_join: this iteration completes all drafts, and no ready draft has waited yet.

        Returns:
            Draft tokens of this iteration, and how many ready drafts to verify.
        """
        self._has_plain = num_plain > 0
        chunk, step_ms = self.draft_chunk, self._costs.decode.at(self.num_running)
        if self.mode != "auto":
            return chunk, len(verify_rows)
        if not num_decoding:
            return chunk, 0 if may_join and num_drafting else len(verify_rows)
        if step_ms is None:
            return chunk, len(verify_rows)
        if self._has_plain and self._fairness_debt_ms:
            return 0, 0
        if not self.limits.max_itl_ratio:
            return chunk, len(verify_rows)
        budget_ms = self.limits.max_itl_ratio * step_ms
        return self._fit_budget(budget_ms, num_drafting, verify_rows, num_decoding)

    def _fit_budget(
        self, budget_ms: float, num_drafting: int, verify_rows: Sequence[int], num_decoding: int
    ) -> tuple[int, int]:
        """Returns as ``limit_iteration``: verification first, then draft tokens."""
        chunk, total, num_verified = self.draft_chunk, num_decoding, 0
        for rows in verify_rows:
            if num_verified and (self._costs.verify.at(total + rows) or 0.0) > budget_ms:
                break
            num_verified, total = num_verified + 1, total + rows
        if "draft_chunk" in self.limits.fixed:
            return chunk, num_verified
        target_ms = (self._costs.verify if num_verified else self._costs.decode).at(total) or 0.0
        token_ms = self._costs.draft_step.at(max(1, num_drafting)) or 0.0
        num_tokens = int((budget_ms - target_ms) / token_ms) if token_ms else chunk
        return max(1, min(chunk, num_tokens)), num_verified
