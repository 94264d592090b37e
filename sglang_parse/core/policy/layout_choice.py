"""Chooses the draft layout (``block``) with the lowest cost per accepted token at this load.

All layouts give the same text. Mask tokens after every row get more tokens accepted per forward
but add rows, which are cheap on a GPU with few requests and expensive with many.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sglang_parse.core.block import ONE_TOKEN, DraftLayout, Masks
from sglang_parse.core.policy.stage_cost import StageCost, StageTime

SWITCH_RATIO = 0.9
"""Another layout replaces the current one if it costs less than this fraction of it."""
MIN_FORWARDS = 16
"""Forwards of each layout before costs are compared. Its first chunk warms up and is not counted;
the next ones may be the last tokens of drafts, which say little about a layout."""
MIN_PROBES = 2
"""Draft chunks of each layout at a load (octaves of requests) before costs are compared there: what
a layout costs one request says little about eight, and the other way round."""
MIN_WEIGHT = 0.01
"""Minimum weight of a forward in the mean of accepted tokens."""
RETRY_EVERY = 64
"""Draft chunks after which the least recently used layout is tried again."""


def layouts_for(size: int, *, allow_one_token: bool) -> tuple[DraftLayout, ...]:
    """Returns the candidate layouts for blocks of ``size`` tokens.

    Args:
        allow_one_token: include one token per forward.
    """
    if size == 1:
        return (ONE_TOKEN,)
    blocks = tuple(DraftLayout(size, masks) for masks in (Masks.EVERY, Masks.LAST))
    return (*blocks, ONE_TOKEN) if allow_one_token else blocks


@dataclass(slots=True)
class LayoutCost:
    """Measured cost of a layout.

    Attributes:
        per_forward: ms per forward, by the number of requests.
        tokens_per_forward: accepted tokens of one request per forward, which depend on the texts,
            not on the load; recency-weighted.
        num_forwards: forwards counted.
        num_probes: draft chunks that were to measure it, by load.
        is_warm: a chunk has been observed.
        last_used: number of the last chunk that used it.
    """

    per_forward: StageCost = field(default_factory=StageCost)
    tokens_per_forward: float = 0.0
    num_forwards: int = 0
    num_probes: Counter[int] = field(default_factory=Counter)
    is_warm: bool = False
    last_used: int = 0

    def add(self, timed: StageTime) -> None:
        """Records a draft chunk."""
        count = timed.num_forwards
        self.num_forwards += count
        weight = min(1.0, count * max(MIN_WEIGHT, 1 / self.num_forwards))
        self.tokens_per_forward += weight * (timed.num_tokens / count - self.tokens_per_forward)
        self.per_forward.add(timed.size, timed.ms / count)

    def per_token(self, num_requests: int) -> float | None:
        """Returns ms per accepted token of one request; None before the first chunk."""
        ms = self.per_forward.at(num_requests)
        return None if ms is None else ms / self.tokens_per_forward


class DraftLayoutChoice:
    """One per server; every tensor-parallel rank feeds its own with rank 0's times.

    Args:
        layouts: candidates, the initial one first.

    Attributes:
        costs: cost by layout.
        num_choices: draft chunks so far.
        current: the cheapest at the last comparison; None before the first.
    """

    def __init__(self, layouts: Sequence[DraftLayout]) -> None:
        self.costs = {layout: LayoutCost() for layout in layouts}
        self.num_choices = 0
        self.current: DraftLayout | None = None

    def choose(self, num_requests: int) -> DraftLayout:
        """Returns the layout of the next draft chunk of this many requests."""
        self.num_choices += 1
        layout = self._to_probe(num_requests)
        if layout is None:
            layout = self.current = self.cheapest(num_requests)
        self.costs[layout].last_used = self.num_choices
        return layout

    def _to_probe(self, num_requests: int) -> DraftLayout | None:
        load = round(math.log2(num_requests))
        for layout, cost in self.costs.items():
            if cost.num_forwards < MIN_FORWARDS or cost.num_probes[load] < MIN_PROBES:
                cost.num_probes[load] += 1
                return layout
        if self.num_choices % RETRY_EVERY:
            return None
        return min(self.costs, key=lambda layout: self.costs[layout].last_used)

    def cheapest(self, num_requests: int) -> DraftLayout:
        """Returns the layout with the lowest cost per accepted token; unmeasured ones come last."""

        def cost(layout: DraftLayout) -> float:
            ms = self.costs[layout].per_token(num_requests)
            if ms is None:
                return float("inf")
            return ms * SWITCH_RATIO if layout == self.current else ms

        return min(self.costs, key=cost)

    def observe(self, iteration: Iterable[StageTime]) -> None:
        """Records the draft stages of one iteration."""
        for timed in iteration:
            if timed.layout is None or not timed.num_tokens:
                continue
            cost = self.costs[timed.layout]
            if cost.is_warm:
                cost.add(timed)
            cost.is_warm = True

    def describe(self, num_requests: int) -> str:
        """Formats the costs at this load for the log."""
        return "; ".join(
            f"{layout}: {cost.per_token(num_requests) or 0:.2f} ms per accepted token, "
            f"{cost.per_forward.at(num_requests) or 0:.2f} ms per forward"
            for layout, cost in self.costs.items()
        )
