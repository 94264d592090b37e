"""One decision from measured prices: whether to draft, how far, judged where, in what bursts.

The plan with the highest rate is taken (``planner``), if that is above the plain target's at the
load there is. Prices are what stages took lately (``prices``); what a draft is worth follows from
where earlier ones of the same threshold were cut (``cuts``), and how far the target agreed with
them behind the cut (``agreement``); ``accounts`` keeps that by threshold.

A threshold that nothing is known of begins as its neighbours stand, or with a few short drafts, one
at a time. Where drafting does not pay, one request tries it again now and then. Numbers only: the
same observations give the same decisions, on every tensor-parallel rank.
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
from sglang_parse.core.policy.planner import Load, Planner
from sglang_parse.core.policy.stage_cost import Stage, StageCosts, StageTime
from sglang_parse.core.policy.threshold_stats import (
    COLD_START_PROBES,
    Key,
    StatsByThreshold,
    ThresholdStats,
    stats_key,
)

COLD_START_TOKENS = 16
"""Draft tokens of a round that is to find out."""
YOUNG = 32
"""Rounds of an account in which each is news."""
RENEW_EVERY = 12
"""Rounds asked for, or one for each running request, between two looks at all plans there are."""
RENEW_MS = 500.0
"""Time of stages between them: a look takes milliseconds, and requests that rest ask often."""
LOADS_PER_OCTAVE = 2
"""How finely numbers of running requests are told apart meanwhile."""
PATIENCE = 12
"""Drafts not begun while a pilot is under way, before another is sent: that one may be gone."""
RETRY_SHARE = 0.005
"""Most of the plain target's time that later trials may lose."""
EARLY = 16.0
"""How much sooner a server's first trial comes, the next ones half as much each, where drafting was
given up after few rounds: those may have compiled kernels, or found the machine busy."""
PRICE_SOON, PRICE_EVERY = 8, 256
"""Drafts after which the plain target's price is taken anew, if nothing else showed it: soon at
first, and half as often each time."""
SURE, SURE_TIMES = 1.5, 8
"""Expected speedup from which the plain target's price is wanted that many times as seldom: all
that ask meanwhile write a segment without a draft."""
SUSPEND_SPEEDUP, RESUME_SPEEDUP = 1.05, 1.1
"""Expected speedup below which drafting ends, and at which it is resumed: what is expected was 4 to
6 % more than what came of it where drafts were about even (simulated shares of 10 and 30 %)."""


@dataclass(slots=True)
class Controller:
    """One per server; every tensor-parallel rank feeds its own with rank 0's times.

    Attributes:
        limits: what there is to decide.
        mode: "auto" decides; "always" drafts and "never" does not, as ``limits`` say.
        num_running: requests that run now, the one asked about included.
        last_plan: the plan made last; None before the first.
        speedup: what drafting was last expected to bring; None while prices are missing.
        eagle_gate: what is known of an EAGLE-3 head's.
    """

    limits: Limits = field(default_factory=Limits)
    mode: str = "auto"
    num_running: int = 1
    last_plan: DraftPlan | None = None
    speedup: float | None = None
    eagle_gate: EagleGate = field(default_factory=EagleGate)
    _costs: StageCosts = field(default_factory=StageCosts)
    _resting: Counter[Key | None] = field(default_factory=Counter)
    _accounts: StatsByThreshold = field(default_factory=StatsByThreshold)
    _drafts_since_price: int = 0
    _price_every: int = PRICE_SOON
    _has_plain: bool = False
    _sooner: float = EARLY
    _fairness_debt_ms: float = 0.0
    _seen_ms: float = 0.0

    # -- what was seen ----------------------------------------------------------

    def observe_load(self, num_running: int, resting: Iterable[Key | None] = ()) -> None:
        """Requests that run now.

        Args:
            resting: of those that do not draft because it does not pay, their account; None of
                those that never do. They wait for others' bursts all the same.
        """
        self.num_running, self._resting = num_running, Counter(resting)

    def observe(self, iteration: Sequence[StageTime]) -> None:
        """The stages of one iteration."""
        self._seen_ms += sum(timed.ms for timed in iteration)
        self._update_fairness_debt(
            sum(timed.ms for timed in iteration if timed.stage is not Stage.SCHEDULER)
        )
        for timed in iteration:
            self._costs.observe(timed)
            if timed.stage is Stage.DRAFT_PREFILL:
                self._observe_draft_prefill(timed)
            elif timed.stage is Stage.DECODE:
                self._observe_decode(timed)

    def _observe_draft_prefill(self, timed: StageTime) -> None:
        """What the draft model had to read before a trial is lost with it."""
        for key in timed.stats_keys:
            account = self._accounts.get(key)
            if account is not None and account.is_suspended:
                account.probe_budget_ms -= timed.ms / len(timed.stats_keys)

    def observe_prefill(self, ms: float, num_read: int = 0, read_ms: float = 0.0) -> None:
        """Prompts of requests that may draft were read: others waited, and more often than among
        their like, as drafts end sooner.

        Args:
            num_read: tokens of all prompts that an EAGLE-3 head read, in ``read_ms``.
        """
        if num_read:
            self.eagle_gate.observe_cost(num_read, read_ms)
        if self._has_plain and self.limits.max_slowdown:
            self._fairness_debt_ms += ms

    def _update_fairness_debt(self, ms: float) -> None:
        """What this iteration took too long for those that never draft, the next ones make good."""
        step_ms = self._costs.decode.at(self.num_running)
        if not self._has_plain or not self.limits.max_slowdown or step_ms is None:
            self._fairness_debt_ms = 0.0
        else:
            self._fairness_debt_ms = max(
                0.0, self._fairness_debt_ms + ms - self.limits.max_slowdown * step_ms
            )

    def _observe_decode(self, timed: StageTime) -> None:
        if self._drafts_since_price > self._price_every:
            self._price_every = min(2 * self._price_every, PRICE_EVERY)
        self._drafts_since_price = 0
        self._save_for_trials(timed.ms)

    def _save_for_trials(self, step_ms: float) -> None:
        """Those that would ask share it: one budget is for all trials together."""
        resting = (self._accounts.get(key) for key in self._resting if key is not None)
        off = [account for account in resting if account is not None and account.is_suspended]
        for account in off:
            sooner = self._sooner if account.cuts.rounds < YOUNG else 1.0
            account.probe_budget_ms += sooner * RETRY_SHARE * step_ms / len(off)

    def observe_round(self, threshold: float, judged: VerifyOutcome, num_failed: int = 0) -> None:
        """A draft was judged; for ``num_failed`` see ``plan``."""
        account = self._accounts.of(stats_key(threshold, num_failed))
        account.waiting, account.cold_start_probes = None, max(0, account.cold_start_probes - 1)
        account.cuts.add(judged, self.num_running)

    def observe_decoded_segment(self, threshold: float, num_tokens: int) -> None:
        """The target finished the segment after a cut."""
        self._accounts.of(stats_key(threshold)).cuts.add_rest(num_tokens)

    @property
    def draft_chunk(self) -> int:
        """Draft tokens per iteration, at most."""
        return self.last_plan.draft_chunk if self.last_plan else self.limits.first_chunk

    # -- rounds -----------------------------------------------------------------

    def plan(self, threshold: float, num_failed: int = 0) -> DraftPlan | None:
        """How a request with this threshold, about to draft, should; None: it should not.

        A pilot and a trial are promised to whoever is told of them, so ask once per draft.

        Args:
            num_failed: how many of its drafts in a row, up to the last, were good for nothing:
                requests differ.
        """
        plan = self._plan(threshold, num_failed)
        self.last_plan = plan or self.last_plan
        return plan

    def _plan(self, threshold: float, num_failed: int) -> DraftPlan | None:
        if self.mode != "auto":
            return self._whole() if self.mode == "always" else None
        if threshold > 1:
            return None  # nothing of a draft can be kept
        key = stats_key(threshold, num_failed)
        account = self._accounts.of(key)
        if account.cold_start_probes == COLD_START_PROBES:
            return self._cold_start_probe(account)
        if self._wants_price():
            return None
        best = self._best_lately(account, self._resting.total() - self._resting[key])
        self.speedup = best.speedup
        account.is_suspended = (best.speedup or 0.0) < (
            RESUME_SPEEDUP if account.is_suspended else SUSPEND_SPEEDUP
        )
        if not account.is_suspended:
            return best
        return (
            self._cold_start_probe(account) if account.cold_start_probes else self._reprobe(account)
        )

    def _wants_price(self) -> bool:
        """Whether it is time to let the plain target write a little, to see what it takes."""
        self._drafts_since_price += 1
        most = self._price_every * (SURE_TIMES if (self.speedup or 0.0) >= SURE else 1)
        return self._costs.decode.at(1) is None or self._drafts_since_price > most

    def _cold_start_probe(self, account: ThresholdStats) -> DraftPlan | None:
        """One request finds out; the others wait for what it brings."""
        if account.waiting is not None and account.waiting < PATIENCE:
            account.waiting += 1
            return None
        account.waiting = 0
        return self._short()

    def _reprobe(self, account: ThresholdStats) -> DraftPlan | None:
        """One request drafts a little all the same, for a small share of the time."""
        plan = self._short()
        loss = self._planner.loss_ms(account.cuts, plan, self.num_running)
        if account.probe_budget_ms < max(loss, 0.0):
            return None
        account.probe_budget_ms = 0.0
        self._sooner = max(1.0, self._sooner / 2)
        return plan

    def _whole(self) -> DraftPlan:
        limits = self.limits
        return DraftPlan(limits.draft_tokens, limits.max_prefixes, limits.first_chunk)

    def _short(self) -> DraftPlan:
        whole = self._whole()
        if "draft_tokens" in self.limits.fixed:
            return whole
        return replace(whole, draft_tokens=min(COLD_START_TOKENS, whole.draft_tokens))

    @property
    def _planner(self) -> Planner:
        return Planner(self.limits, self._costs)

    def _best_lately(self, account: ThresholdStats, resting: int) -> DraftPlan:
        """The best plan; to look takes milliseconds: anew at another load and where something may
        have changed."""
        load = round(LOADS_PER_OCTAVE * math.log2(self.num_running))
        account.num_asked += 1
        rounds = account.cuts.rounds
        is_new = rounds < YOUNG and rounds != account.at_rounds
        is_old = account.num_asked >= max(RENEW_EVERY, self.num_running)
        is_old = is_old and self._seen_ms - account.at_ms >= RENEW_MS
        if account.best is None or is_new or is_old or load != account.at_load:
            resting = min(resting, self.num_running - 1)
            running = Load(self.num_running - resting, resting)
            account.best, account.at_load = self._planner.best(account.cuts, running), load
            account.num_asked, account.at_rounds, account.at_ms = 0, rounds, self._seen_ms
        return account.best

    # -- requests ---------------------------------------------------------------

    def uses_eagle(self, threshold: float) -> bool:
        """Whether an EAGLE-3 head reads along with a request that may draft, about to begin."""
        step_ms = self._costs.decode.at(self.num_running)
        if self.mode != "auto" or step_ms is None:
            return True
        written = self.num_running * self._costs.tokens_per_step
        return self.eagle_gate.pays(threshold, step_ms / written)

    # -- iterations -------------------------------------------------------------

    def limit_iteration(
        self,
        num_drafting: int,
        rows: Sequence[int],
        num_stepping: int,
        num_plain: int = 0,
        *,
        may_join: bool = False,
    ) -> tuple[int, int]:
        """(Draft tokens of the coming burst, how many drafts its pass judges).

        Where nobody waits for a next token, all that is ready; or nothing yet, where the others may
        join that pass and the next draft: two halves in turns pay for twice as many forwards. Else
        as much as keeps the iteration within ``limits.max_itl_ratio`` plain steps, but a token and a draft at
        least; and nothing while requests that never draft are owed time.

        Args:
            num_drafting: requests that draft.
            rows: per draft that is over, the rows of its pass; who waited longest comes first.
            num_stepping: requests that continue or do not draft.
            num_plain: those of them that never do.
            may_join: the burst ends all drafts under way, and no other has waited for them yet.
        """
        self._has_plain = num_plain > 0
        burst, step_ms = self.draft_chunk, self._costs.decode.at(self.num_running)
        if self.mode != "auto":
            return burst, len(rows)
        if not num_stepping:
            return burst, 0 if may_join and num_drafting else len(rows)
        if step_ms is None:
            return burst, len(rows)
        if self._has_plain and self._fairness_debt_ms:
            return 0, 0
        if not self.limits.max_itl_ratio:
            return burst, len(rows)
        return self._within(self.limits.max_itl_ratio * step_ms, num_drafting, rows, num_stepping)

    def _within(
        self, budget: float, num_drafting: int, rows: Sequence[int], num_stepping: int
    ) -> tuple[int, int]:
        """What ``limit_iteration`` gives in so many ms."""
        burst, total, judged = self.draft_chunk, num_stepping, 0
        for more in rows:
            if judged and (self._costs.verify.at(total + more) or 0.0) > budget:
                break
            judged, total = judged + 1, total + more
        if "draft_chunk" in self.limits.fixed:
            return burst, judged
        spent = (self._costs.verify if judged else self._costs.decode).at(total) or 0.0
        each = self._costs.draft_step.at(max(1, num_drafting)) or 0.0
        room = int((budget - spent) / each) if each else burst
        return max(1, min(burst, room)), judged
