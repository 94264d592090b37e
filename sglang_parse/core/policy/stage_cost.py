"""What stages take, by their size: learned from what they took lately. Numbers only, no clock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from sglang_parse.core.block import DraftLayout

NEWEST = 0.1
"""Least weight of an observation in the mean of its size."""
NEWEST_STEP = 0.05
"""Weight of a step in the mean of what a step writes."""
OUTLIER = 3.0
"""An observation counts as at most this many times that mean: first calls compile. One of less than
a third says that the mean was of such."""
FIRST = 3
"""Observations of a size that count in full."""
SIZES_PER_OCTAVE = 2
"""How finely sizes are told apart."""


class Stage(Enum):
    DRAFT_PREFILL = (
        "draft_prefill"  # the draft model reads what it lacks of sequences it is to write on
    )
    DRAFT = "draft"  # a burst of draft tokens
    VERIFY = "verify"  # a forward of the target in which drafts are judged
    DECODE = (
        "decode"  # the target writes on, alone or with its EAGLE-3 head, and no draft is judged
    )
    SCHEDULER = (
        "scheduler"  # what is between an iteration and the next, where nothing runs meanwhile
    )


@dataclass(frozen=True, slots=True)
class StageTime:
    """What a stage took in one iteration.

    Attributes:
        size: requests of a burst, of a step or of an iteration; rows of a pass or of a fill.
        amount: tokens a burst wrote per request, tokens a step wrote; else 0.
        ms: wall time.
        forwards: of the draft model, in a burst.
        plan: a burst's.
        accounts: of a fill, those of its requests (``accounts.Key``).
    """

    stage: Stage
    size: int
    num_tokens: float
    ms: float
    num_forwards: int = 0
    layout: DraftLayout | None = None
    stats_keys: tuple[tuple[float, int], ...] = ()


@dataclass(slots=True)
class _Mean:
    """Of the observations of about one size, the latest counting most."""

    size: float = 0.0
    ms: float = 0.0
    count: int = 0

    def add(self, size: float, ms: float) -> None:
        if ms * OUTLIER < self.ms:
            self.count = 0
        self.count += 1
        if self.count > FIRST:
            ms = min(ms, OUTLIER * self.ms)
        weight = max(NEWEST, 1 / self.count)
        self.size += weight * (size - self.size)
        self.ms += weight * (ms - self.ms)

    def cap(self, ms: float) -> None:
        """It cannot be worth three times as much as a larger size."""
        if ms * OUTLIER < self.ms:
            self.count, self.ms = 1, ms


@dataclass(slots=True)
class StageCost:
    """ms of a stage by its size: never falling with the size, never below nothing.

    Between sizes that were seen it lies on a straight line between them, beyond them on one with
    the slope that fits them all.
    """

    _means: dict[int, _Mean] = field(default_factory=dict)
    _points: list[tuple[float, float]] = field(default_factory=list)
    _slope: float = 0.0

    def add(self, size: float, ms: float) -> None:
        """One more observation: a stage of this size took that long."""
        key = round(SIZES_PER_OCTAVE * math.log2(max(1.0, size)))
        found = self._means.setdefault(key, _Mean())
        found.add(size, ms)
        # What is smaller costs no more; it may not have been seen since the server's first calls.
        for smaller, mean in self._means.items():
            if smaller < key:
                mean.cap(found.ms)
        self._points = []

    def at(self, size: float) -> float | None:
        """The expected time of a stage of this size; None before the first observation."""
        if not self._means:
            return None
        if not self._points:
            self._points = _rising(self._means.values())
            self._slope = _slope(self._points)
        (first, least), (last, most) = self._points[0], self._points[-1]
        if size <= first:
            return max(0.0, least - self._slope * (first - size))
        for (x0, y0), (x1, y1) in pairwise(self._points):
            if size <= x1:
                return y0 + (y1 - y0) * (size - x0) / (x1 - x0)
        return most + self._slope * (size - last)


def _rising(means: Iterable[_Mean]) -> list[tuple[float, float]]:
    """(size, ms) by size; noise must not turn the line round."""
    points, highest = [], 0.0
    for mean in sorted(means, key=lambda mean: mean.size):
        highest = max(highest, mean.ms)
        points.append((mean.size, highest))
    return points


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Least squares; none takes none."""
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if not spread:
        return 0.0
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    return min(max(0.0, slope), min(y / x for x, y in points))


@dataclass(slots=True)
class StageCosts:
    """What the stages of this server take, by size as in ``StageTime``.

    Attributes:
        draft_step: of a burst, per token that a request drafts; ``verify``, ``decode``, ``scheduler``:
            of the other stages.
        tokens_per_step: what a step writes of an answer: above 1 with an EAGLE-3 head.
    """

    draft_step: StageCost = field(default_factory=StageCost)
    verify: StageCost = field(default_factory=StageCost)
    decode: StageCost = field(default_factory=StageCost)
    scheduler: StageCost = field(default_factory=StageCost)
    tokens_per_step: float = 1.0

    def observe(self, timed: StageTime) -> None:
        """A stage of an iteration; what is read before a draft is no part of any plan."""
        if timed.stage is Stage.DRAFT:
            self.draft_step.add(timed.size, timed.ms / max(1, timed.num_tokens))
        elif timed.stage is Stage.VERIFY:
            self.verify.add(timed.size, timed.ms)
        elif timed.stage is Stage.SCHEDULER:
            self.scheduler.add(timed.size, timed.ms)
        elif timed.stage is Stage.DECODE:
            self.decode.add(timed.size, timed.ms)
            written = timed.num_tokens / timed.size
            self.tokens_per_step += NEWEST_STEP * (written - self.tokens_per_step)
