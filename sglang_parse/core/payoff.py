"""The off switch: does drafting pay now? Numbers only; whoever measures them brings them here.

A round costs the time of its draft and of its pass, and yields the tokens it emits. The plain
target yields as many for the time of its steps. Both prices are taken at the load there is now,

    pays  <=>  drafted * burst_step(n) + pass(n * rows)  <  emitted / tokens_per_step * step(n)

for n running requests, from what the stages took lately. So load, context length, acceptance and
what an EAGLE-3 head makes of the plain target all count, and none of them is modelled.

Requests with different thresholds keep different shares of their drafts: each threshold has its
own account. Where drafting does not pay, a single request tries it again now and then, for at most
``RETRY_SHARE`` of the time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from sglang_parse.core.block import BlockPlan

RETRY_SHARE = 0.03
"""Most of the plain target's time that rounds on trial may lose."""
MIN_ROUNDS = 3
"""Rounds of a threshold before it is judged at all: one bad draft says little."""
PRICE_EVERY = 256
"""Drafts after which the plain target's price is taken anew, if nothing else showed it."""
COMEBACK = 1.1
"""Expected speedup at which drafting is resumed; it ends below 1."""
MEMORY = 0.95
"""Weight of what has been seen before, per observation of a stage."""
ROUND_MEMORY = 0.8
"""The same per round of a threshold."""
OUTLIER = 3.0
"""An observation counts as at most this many times what was expected: first calls compile."""
MAX_THRESHOLDS = 32
"""Accounts kept, the ones used last: a client may send any threshold."""


class Stage(Enum):
    BURST = "burst"  # a burst of draft tokens
    PASS = "pass"  # a forward of the target in which drafts are judged
    STEP = "step"  # the target writes on, alone or with its EAGLE-3 head, and no draft is judged


@dataclass(frozen=True, slots=True)
class Timed:
    """What a stage took in one iteration.

    Attributes:
        size: requests of a burst or step, rows of a pass.
        amount: tokens a burst wrote per request, tokens a step wrote; 0 for a pass.
        ms: wall time.
        forwards: of the draft model, in a burst.
        plan: a burst's.
    """

    stage: Stage
    size: int
    amount: float
    ms: float
    forwards: int = 0
    plan: BlockPlan | None = None


class StageCost:
    """What a stage takes, as ``base + slope * size``: least squares that forget. Times in ms."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, size: float, ms: float) -> None:
        """One more observation: a stage of this size took that long."""
        expected = self.at(size)
        if expected is not None:
            ms = min(ms, OUTLIER * expected)
        new = (1.0, size, ms, size * size, size * ms)
        old = (self._weight, self._x, self._y, self._xx, self._xy)
        self._weight, self._x, self._y, self._xx, self._xy = (
            MEMORY * before + now for before, now in zip(old, new, strict=True)
        )

    def at(self, size: float) -> float | None:
        """The expected time of a stage of this size; None before the first observation.

        Never falling with the size, never below nothing: noise must not turn the line round.
        """
        if not self._weight:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        if spread < 1e-6 * mean_x * mean_x:
            return mean_y
        slope = max(0.0, (self._xy / self._weight - mean_x * mean_y) / spread)
        slope = min(slope, mean_y / mean_x)
        return mean_y + slope * (size - mean_x)


@dataclass(slots=True)
class Account:
    """How the rounds of one threshold went lately: means per round.

    Attributes:
        drafted, emitted: tokens; ``rows``: rows in the verification pass.
        rounds: how many have been seen.
        is_off: drafting did not pay when it was last judged.
        to_spend_ms: what a trial may lose by now.
    """

    drafted: float = 0.0
    emitted: float = 0.0
    rows: float = 0.0
    rounds: int = 0
    is_off: bool = False
    to_spend_ms: float = 0.0

    def add(self, drafted: int, emitted: int, rows: int) -> None:
        self.rounds += 1
        weight = max(1 - ROUND_MEMORY, 1 / self.rounds)
        self.drafted += weight * (drafted - self.drafted)
        self.emitted += weight * (emitted - self.emitted)
        self.rows += weight * (rows - self.rows)


@dataclass(slots=True)
class OffSwitch:
    """One per server; every tensor-parallel rank feeds its own with rank 0's times.

    Attributes:
        mode: "auto" decides, "always" drafts, "never" does not.
        num_running: requests that run now, the one asked about included.
        speedup: what drafting was last expected to bring, as a ratio to the plain target's speed;
            None while prices are missing.
    """

    mode: str = "auto"
    num_running: int = 1
    speedup: float | None = None
    _burst_step: StageCost = field(default_factory=StageCost)
    _pass: StageCost = field(default_factory=StageCost)
    _step: StageCost = field(default_factory=StageCost)
    _tokens_per_step: float = 1.0
    _accounts: OrderedDict[float, Account] = field(default_factory=OrderedDict)
    _drafts_since_price: int = 0

    # -- what was seen ----------------------------------------------------------

    def saw(self, iteration: Iterable[Timed]) -> None:
        """The stages of one iteration."""
        for timed in iteration:
            if timed.stage is Stage.BURST:
                self._burst_step.add(timed.size, timed.ms / max(1, timed.amount))
            elif timed.stage is Stage.PASS:
                self._pass.add(timed.size, timed.ms)
            else:
                self._saw_step(timed)

    def _saw_step(self, timed: Timed) -> None:
        self._step.add(timed.size, timed.ms)
        per_request = timed.amount / timed.size
        self._tokens_per_step += (1 - MEMORY) * (per_request - self._tokens_per_step)
        self._drafts_since_price = 0
        for account in self._accounts.values():
            if account.is_off:
                account.to_spend_ms += RETRY_SHARE * timed.ms

    def saw_round(self, threshold: float, drafted: int, emitted: int, rows: int) -> None:
        """A draft was judged: what it held, what its request got out of it, rows of its pass."""
        self._account(threshold).add(drafted, emitted, rows)

    # -- what follows -----------------------------------------------------------

    def should_draft(self, threshold: float) -> bool:
        """Whether a request with this threshold, about to draft, should.

        Saying yes to a trial spends what it may lose, so ask once per draft.
        """
        account = self._account(threshold)
        self._appraise(account)
        if self.mode != "auto":
            return self.mode == "always"
        if threshold > 1:
            return False  # nothing of a draft can be kept
        if account.rounds < MIN_ROUNDS:
            return True
        if self._wants_price():
            return False
        return not account.is_off or self._may_try(account)

    def _appraise(self, account: Account) -> None:
        if account.rounds < MIN_ROUNDS or self._step.at(1) is None:
            return
        count = self.num_running
        self.speedup = self._worth(account, count) / max(1e-9, self._price(account, count))
        account.is_off = self.speedup < (COMEBACK if account.is_off else 1.0)

    def _wants_price(self) -> bool:
        """Whether it is time to let the plain target write a little, to see what it takes."""
        self._drafts_since_price += 1
        return self._step.at(1) is None or self._drafts_since_price > PRICE_EVERY

    def _price(self, account: Account, count: int) -> float:
        """Time of a round of ``count`` requests together."""
        burst_step, one_pass = self._burst_step.at(count), self._pass.at(count * account.rows)
        return account.drafted * (burst_step or 0.0) + (one_pass or 0.0)

    def _worth(self, account: Account, count: int) -> float:
        """Time in which the plain target would write what such a round emits."""
        return account.emitted / self._tokens_per_step * (self._step.at(count) or 0.0)

    def _may_try(self, account: Account) -> bool:
        # All wait while one request drafts; it saves its share of the steps for what it emits.
        count = self.num_running
        loss = self._price(account, 1) - self._worth(account, count) / count
        if account.to_spend_ms < max(loss, 0.0):
            return False
        account.to_spend_ms = 0.0
        return True

    def _account(self, threshold: float) -> Account:
        account = self._accounts.setdefault(threshold, Account())
        self._accounts.move_to_end(threshold)
        while len(self._accounts) > MAX_THRESHOLDS:
            self._accounts.popitem(last=False)
        return account
