"""What forwards cost: wall time of a stage by its size, and the cheapest kind of block."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from sglang_parse.core.block import BlockKind
from sglang_parse.core.pace import Pace
from sglang_parse.core.policy.constants import PolicyConfig
from sglang_parse.core.stage import StageTime, half_octave_of


@dataclass(slots=True)
class _Mean:
    size: float
    ms: float = 0.0
    last_ms: float = 0.0
    num_seen: int = 0
    last_seen: int = 0


class StageCost:
    """Expected ms of a stage by its size; a larger size costs no less. Stages share a ``pace``."""

    def __init__(self, config: PolicyConfig, pace: Pace | None = None) -> None:
        self._config, self._num_seen, self._pace = config, 0, pace or Pace()
        self._num_runs: Counter[int | tuple[int, ...]] = Counter()
        self._means: dict[int, _Mean] = {}  # by half octave
        self._sizes: list[float] = []  # of warm and recent means, ascending
        self._ms: list[float] = []

    def add(self, size: float, ms: float, graphs: tuple[int, ...] = ()) -> float | None:
        """Records a forward. The first ones of the same kernels, those of the same ``graphs``
        (``StageTime``) or of about this size, may have compiled them: no mean contains them.

        Returns:
            Its ms, limited by the mean; None for a first one if nothing is known, or it takes far
            longer than other sizes suggest.
        """
        config, expected = self._config, self.at(size)
        half_octave = half_octave_of(size)
        mean = self._means.setdefault(half_octave, _Mean(size))
        self._num_seen += 1
        kernels = graphs if graphs and all(graphs) else half_octave
        self._num_runs[kernels] += 1
        if self._num_runs[kernels] <= config.cold_forwards:
            return None if expected is None or ms > config.max_outlier * expected else ms
        is_old = self._num_seen - mean.last_seen >= config.retry_every
        mean.num_seen, mean.last_seen = 1 if is_old else 1 + mean.num_seen, self._num_seen
        known = expected if expected and mean.num_seen > 1 else ms
        ms = min(ms, config.max_outlier * known)
        # A mean well above two forwards in a row comes from cold ones; one may be a mistake.
        now = ms / self._pace.factor
        is_high = max(now, mean.last_ms) < 0.75 * mean.ms
        weight = max(0.5 if is_high else config.mean_weight, 1 / mean.num_seen)
        mean.last_ms, mean.ms = now, mean.ms + weight * (now - mean.ms)
        mean.size += weight * (size - mean.size)
        self._update()
        self._pace.see(ms, known)
        return ms

    def knows(self, size: float) -> bool:
        """Whether a warm forward of a size within an octave was seen lately."""
        return any(size / 2 <= known <= 2 * size for known in self._sizes)

    def is_due(self, size: float) -> bool:
        """Whether a forward of about this size should be seen again now: the last one, and the last
        such question, are long ago."""
        mean = self._means.get(half_octave_of(size), _Mean(size))
        age = self._num_seen - mean.last_seen
        return mean.num_seen > 0 and (age + 1) % self._config.retry_every == 0

    def at(self, size: float) -> float | None:
        """Returns the ms of this size, interpolated; None before the first warm forward. Beyond the
        largest size a hopeful guess: what is believed to cost too much is never tried, and the
        slope between two small sizes may be noise."""
        sizes, ms = self._sizes, self._ms
        if not sizes:
            return None
        per_row = min(1 / (sizes[-1] if len(sizes) > 1 else 4 * sizes[-1]), self._config.row_cost)
        found = ms[-1] * (1 + per_row * max(0.0, size - sizes[-1]))
        if i := min(bisect_left(sizes, size), len(sizes) - 1):
            slope = (ms[i] - ms[i - 1]) / (sizes[i] - sizes[i - 1])
            found = min(found, ms[i - 1] + slope * (size - sizes[i - 1]))
        return self._pace.factor * (found if size > sizes[0] else ms[0])

    def _update(self) -> None:
        oldest, means = self._num_seen - self._config.max_age, self._means.values()
        warm = sorted((m.size, m.ms) for m in means if m.num_seen and m.last_seen > oldest)
        self._sizes = [size for size, _ in warm]
        self._ms = [*accumulate((ms for _, ms in warm), max)]


@dataclass(slots=True)
class BlockCost:
    """ms per forward of a kind by requests; decayed counts of the draft tokens that it brought to
    a request, and of the forwards in which that request's draft was not over yet."""

    per_forward: StageCost
    num_tokens: float = 0.0
    num_used: float = 0.0
    last_used: int = 0

    def per_token(self, num_requests: float) -> float:
        ms = self.per_forward.at(num_requests) if self.num_used else None
        return math.inf if ms is None else ms / max(1e-9, self.tokens_per_forward)

    def knows(self, num_requests: float) -> bool:
        """Whether forwards of about this size, and the tokens that they bring, were seen."""
        return self.num_used > 0 and self.per_forward.knows(num_requests)

    @property
    def tokens_per_forward(self) -> float:
        """Draft tokens that a forward adds to a draft that is not over; 0 before the first one."""
        return self.num_tokens / self.num_used if self.num_used else 0.0


class BlockChoice:
    """Chooses the kind of block of each chunk by its ms per accepted token at this load.

    All kinds write the same text. Mask tokens after every row get more tokens per forward but add
    rows, which are cheap on a GPU with few requests and expensive with many.

    Attributes:
        current: the cheapest one at the last comparison.
        probe_tokens: most draft tokens of the chunk that ``choose`` was called for, if it is to
            measure its kind; 0 for no limit.
    """

    def __init__(self, kinds: Sequence[BlockKind], config: PolicyConfig) -> None:
        self.costs = {kind: BlockCost(StageCost(config)) for kind in kinds}
        self.current, self._config, self.num_chunks, self.probe_tokens = kinds[0], config, 0, 0

    def choose(self, num_requests: int, among: Iterable[BlockKind] = ()) -> BlockKind:
        """Returns the kind of the next chunk of this many requests: one that was not measured at
        this load, now and then the longest unused one, else the cheapest; ``among`` these, all
        kinds if there are none."""
        self.num_chunks += 1
        costs = {kind: self.costs[kind] for kind in among} or self.costs
        chosen = next((x for x in costs if not costs[x].knows(num_requests)), None)
        if chosen is None and self.num_chunks % self._config.retry_every == 0:
            chosen = min(costs, key=lambda kind: costs[kind].last_used)
        # A whole draft of single tokens would cost a probe many times what it finds out.
        self.probe_tokens = self._config.probe_tokens if chosen and len(costs) > 1 else 0
        if chosen is None:
            chosen = self.current = min(costs, key=lambda x: costs[x].per_token(num_requests))
        costs[chosen].last_used = self.num_chunks
        return chosen

    def observe(self, timed: StageTime) -> float | None:
        """Records a chunk; returns its ms as ``StageCost.add`` does."""
        cost = self.costs[timed.kind]
        count = timed.num_forwards or max(1, round(timed.num_tokens))
        keep = 0.5 ** (count / self._config.retry_every)
        num_tokens, num_used = timed.continued or (timed.num_tokens, count)
        cost.num_tokens = keep * cost.num_tokens + num_tokens
        cost.num_used = keep * cost.num_used + num_used
        ms = cost.per_forward.add(timed.size, timed.ms / count)
        return None if ms is None else ms * count

    def knows(self, num_requests: float) -> bool:
        """Whether ``BlockCost.knows`` is true of a kind."""
        return any(cost.knows(num_requests) for cost in self.costs.values())

    def per_token(self, num_requests: float) -> float:
        """Returns ms per draft token of a request; infinity before the first warm chunk."""
        return min(cost.per_token(num_requests) for cost in self.costs.values())
