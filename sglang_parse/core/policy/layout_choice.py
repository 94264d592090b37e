"""Which plan a burst takes (``block``): the one whose kept tokens are cheapest at this load.

Every plan brings the same text. Masks behind every row keep more tokens of a forward and have more
rows: free on a GPU with few requests, dear on one with many; so prices decide, taken from what
bursts took lately.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sglang_parse.core.block import ONE_TOKEN, DraftLayout, Masks
from sglang_parse.core.policy.stage_cost import StageCost, StageTime


def layouts_for(size: int, *, allow_one_token: bool) -> tuple[DraftLayout, ...]:
    """What a draft may do whose blocks have ``size`` tokens.

    Args:
        allow_one_token: also write one token a forward, where that is faster.
    """
    if size == 1:
        return (ONE_TOKEN,)
    blocks = tuple(DraftLayout(size, masks) for masks in (Masks.EVERY, Masks.LAST))
    return (*blocks, ONE_TOKEN) if allow_one_token else blocks


STAYS = 0.9
"""The plan in use is left for one that costs less than this much of it."""
TRIALS = 3
"""Bursts of each plan before it is judged; the first warms up and does not count."""
RETRY_EVERY = 64
"""Bursts after which the plan not used for longest is tried again: load and texts change."""


@dataclass(slots=True)
class LayoutCost:
    """What a plan's bursts took lately.

    Attributes:
        per_token: ms per kept token of one request, by the number of requests.
        per_forward: ms per forward, by the number of requests.
        bursts: how many were seen.
        last_used: the number of the last one.
    """

    per_token: StageCost = field(default_factory=StageCost)
    per_forward: StageCost = field(default_factory=StageCost)
    bursts: int = 0
    last_used: int = 0


class DraftLayoutChoice:
    """Which plan the bursts take: the one whose kept tokens are cheapest at the load there is.

    Every tensor-parallel rank has its own, fed with rank 0's times.

    Args:
        plans: the plans there are, the one to begin with first.

    Attributes:
        current: the cheapest when it was last asked for; None while all are on trial.
    """

    def __init__(self, plans: Sequence[DraftLayout]) -> None:
        self.costs = {plan: LayoutCost() for plan in plans}
        self.num_choices = 0
        self.current: DraftLayout | None = None

    def choose(self, num_requests: int) -> DraftLayout:
        """The plan of a burst of this many requests."""
        self.num_choices += 1
        plan = self._due()
        if plan is None:
            plan = self.current = self.cheapest(num_requests)
        self.costs[plan].last_used = self.num_choices
        return plan

    def _due(self) -> DraftLayout | None:
        """A plan that has to be tried."""
        for plan, price in self.costs.items():
            if price.bursts < TRIALS:
                return plan
        if self.num_choices % RETRY_EVERY:
            return None
        return min(self.costs, key=lambda plan: self.costs[plan].last_used)

    def cheapest(self, num_requests: int) -> DraftLayout:
        """The plan whose kept tokens were cheapest; one without a price last."""

        def price(plan: DraftLayout) -> float:
            found = self.costs[plan].per_token.at(num_requests)
            if found is None:
                return float("inf")
            return found * STAYS if plan == self.current else found

        return min(self.costs, key=price)

    def observe(self, iteration: Iterable[StageTime]) -> None:
        """The stages of one iteration; bursts are looked at."""
        for timed in iteration:
            if timed.layout is None or not timed.num_tokens:
                continue
            price = self.costs[timed.layout]
            price.bursts += 1
            if price.bursts > 1:
                price.per_token.add(timed.size, timed.ms / timed.num_tokens)
                price.per_forward.add(timed.size, timed.ms / timed.num_forwards)

    def describe(self, num_requests: int) -> str:
        """The prices at this load, in words."""
        return "; ".join(
            f"{plan}: {price.per_token.at(num_requests) or 0:.2f} ms a kept token, "
            f"{price.per_forward.at(num_requests) or 0:.2f} ms a forward"
            for plan, price in self.costs.items()
        )
