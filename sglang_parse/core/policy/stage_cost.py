"""Learns the wall time of each stage as a function of its size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from sglang_parse.core.block import DraftLayout

MIN_WEIGHT = 0.1
"""Minimum weight of an observation in its size's mean."""
TOKENS_PER_STEP_WEIGHT = 0.05
"""EMA weight of the tokens of a decode step."""
OUTLIER = 3.0
"""Observations are capped at this multiple of the mean, because first calls compile. One below
1/``OUTLIER`` of the mean resets it: then the mean itself came from such calls."""
NUM_UNCAPPED = 3
"""First observations of a size that are not capped."""
SIZES_PER_OCTAVE = 2
"""Resolution of sizes."""


class Stage(Enum):
    DRAFT_PREFILL = "draft_prefill"  # the draft model computes missing KV before it drafts
    DRAFT = "draft"  # draft tokens of one iteration
    VERIFY = "verify"  # target forward that verifies drafts
    DECODE = "decode"  # target forward without drafts, with or without an EAGLE-3 head
    SCHEDULER = "scheduler"  # time between two iterations in which no forward runs


@dataclass(frozen=True, slots=True)
class StageTime:
    """Wall time of one stage in one iteration.

    Attributes:
        size: requests (draft, decode, scheduler) or rows (verify, draft prefill).
        num_tokens: drafted tokens per request (draft), decoded tokens of all (decode), else 0.
        num_forwards: draft model forwards (draft).
        layout: draft layout (draft).
        stats_keys: the requests' ``threshold_stats.StatsKey`` (draft prefill).
    """

    stage: Stage
    size: int
    num_tokens: float
    ms: float
    num_forwards: int = 0
    layout: DraftLayout | None = None
    stats_keys: tuple[tuple[float, int, str], ...] = ()


@dataclass(slots=True)
class _SizeMean:
    """Recency-weighted mean of the observations of similar sizes."""

    size: float = 0.0
    ms: float = 0.0
    count: int = 0

    def add(self, size: float, ms: float) -> None:
        if ms * OUTLIER < self.ms:
            self.count = 0
        self.count += 1
        if self.count > NUM_UNCAPPED:
            ms = min(ms, OUTLIER * self.ms)
        weight = max(MIN_WEIGHT, 1 / self.count)
        self.size += weight * (size - self.size)
        self.ms += weight * (ms - self.ms)

    def cap(self, larger_ms: float) -> None:
        """Resets the mean if it exceeds ``OUTLIER`` times that of a larger size."""
        if larger_ms * OUTLIER < self.ms:
            self.count, self.ms = 1, larger_ms


@dataclass(slots=True)
class StageCost:
    """Expected ms of a stage by its size: nonnegative and nondecreasing.

    Interpolates linearly between observed sizes and extrapolates with the least-squares slope.
    """

    _means: dict[int, _SizeMean] = field(default_factory=dict)
    _points: list[tuple[float, float]] = field(default_factory=list)
    _slope: float = 0.0

    def add(self, size: float, ms: float) -> None:
        key = round(SIZES_PER_OCTAVE * math.log2(max(1.0, size)))
        found = self._means.setdefault(key, _SizeMean())
        found.add(size, ms)
        # Smaller sizes cost no more; theirs may date from the server's first calls.
        for smaller, mean in self._means.items():
            if smaller < key:
                mean.cap(found.ms)
        self._points = []

    def at(self, size: float) -> float | None:
        """Returns the expected ms at this size; None before the first observation."""
        if not self._means:
            return None
        if not self._points:
            self._points = _nondecreasing(self._means.values())
            self._slope = _slope(self._points)
        (first, least), (last, most) = self._points[0], self._points[-1]
        if size <= first:
            return max(0.0, least - self._slope * (first - size))
        for (x0, y0), (x1, y1) in pairwise(self._points):
            if size <= x1:
                return y0 + (y1 - y0) * (size - x0) / (x1 - x0)
        return most + self._slope * (size - last)


def _nondecreasing(means: Iterable[_SizeMean]) -> list[tuple[float, float]]:
    """Returns (size, ms) by size, with ms raised to the maximum so far."""
    points, highest = [], 0.0
    for mean in sorted(means, key=lambda mean: mean.size):
        highest = max(highest, mean.ms)
        points.append((mean.size, highest))
    return points


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Returns the least-squares slope, limited so that size 0 costs at least 0."""
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if not spread:
        return 0.0
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    return min(max(0.0, slope), min(y / x for x, y in points))


@dataclass(slots=True)
class StageCosts:
    """Stage costs of this server; sizes as in ``StageTime``.

    Attributes:
        draft_step: ms per drafted token of a request.
        tokens_per_step: mean tokens per request and decode step: above 1 with an EAGLE-3 head.
    """

    draft_step: StageCost = field(default_factory=StageCost)
    verify: StageCost = field(default_factory=StageCost)
    decode: StageCost = field(default_factory=StageCost)
    scheduler: StageCost = field(default_factory=StageCost)
    tokens_per_step: float = 1.0

    def observe(self, timed: StageTime) -> None:
        """Records a stage time. Draft prefill is not part of any plan, so it is ignored."""
        if timed.stage is Stage.DRAFT:
            self.draft_step.add(timed.size, timed.ms / max(1, timed.num_tokens))
        elif timed.stage is Stage.VERIFY:
            self.verify.add(timed.size, timed.ms)
        elif timed.stage is Stage.SCHEDULER:
            self.scheduler.add(timed.size, timed.ms)
        elif timed.stage is Stage.DECODE:
            self.decode.add(timed.size, timed.ms)
            per_request = timed.num_tokens / timed.size
            self.tokens_per_step += TOKENS_PER_STEP_WEIGHT * (per_request - self.tokens_per_step)
