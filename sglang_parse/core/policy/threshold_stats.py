"""Keeps acceptance statistics and the drafting state per threshold.

Requests whose last drafts failed have separate statistics, and so have those of a LoRA adapter,
whose target writes something else. Clients may send any threshold, so only the most recently used
entries are kept, and a new entry starts from its neighbours.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from sglang_parse.core.phases import DraftPlan
from sglang_parse.core.policy.acceptance import ERROR_RATE, AcceptanceModel
from sglang_parse.core.policy.lru import lru_get

COLD_START_PROBES = 3
"""Rounds of an unknown threshold before drafting may be suspended: one bad draft proves little."""
MAX_FAILURES = 3
"""Consecutive failed drafts that are distinguished."""
MAX_ENTRIES = 128

StatsKey = tuple[float, int, str]
"""(threshold, consecutive failed drafts, LoRA adapter)."""


def stats_key(threshold: float, num_failed: int = 0, adapter: str = "") -> StatsKey:
    return threshold, min(num_failed, MAX_FAILURES), adapter


@dataclass(slots=True)
class ThresholdStats:
    """Statistics and drafting state of one ``StatsKey``.

    Attributes:
        acceptance: acceptance of its drafts.
        best_plan: result of the last plan search; None before the first.
        num_queries: queries since that search.
        search_load, search_rounds, search_ms: load bucket, rounds and observed stage time at that
            search.
        cold_start_probes: rounds still needed before drafting may be suspended.
        is_suspended: drafting did not pay at the last query.
        num_waiting: queries since a cold-start probe began; None while none is in flight.
        probe_budget_ms: time that the next re-probe may lose.
    """

    acceptance: AcceptanceModel
    best_plan: DraftPlan | None = None
    num_queries: int = 0
    search_load: int = 0
    search_rounds: int = 0
    search_ms: float = 0.0
    cold_start_probes: int = COLD_START_PROBES
    is_suspended: bool = False
    num_waiting: int | None = None
    probe_budget_ms: float = 0.0


@dataclass(slots=True)
class StatsByThreshold:
    """The statistics of one server."""

    _entries: OrderedDict[StatsKey, ThresholdStats] = field(default_factory=OrderedDict)

    def get(self, key: StatsKey) -> ThresholdStats:
        """Returns the entry of ``key`` and creates it if missing."""
        return lru_get(self._entries, key, lambda: self._create(*key), MAX_ENTRIES)

    def peek(self, key: StatsKey) -> ThresholdStats | None:
        """Returns the entry of ``key``, if any, without marking it as used."""
        return self._entries.get(key)

    def _create(self, threshold: float, num_failed: int, adapter: str) -> ThresholdStats:
        """Starts from one failure less, or from the nearest thresholds.

        Acceptance is monotone: a stricter threshold accepts no more, a laxer one no less.
        """
        if num_failed:
            before = self.get(stats_key(threshold, num_failed - 1, adapter)).acceptance
            return ThresholdStats(AcceptanceModel(before.error_rate), cold_start_probes=0)
        known = {
            value: stats.acceptance.error_rate
            for (value, failed, adapted), stats in self._entries.items()
            if adapted == adapter and not failed and not stats.cold_start_probes
        }
        laxer = max((value for value in known if value <= threshold), default=None)
        stricter = min((value for value in known if value >= threshold), default=None)
        found = [known[value] for value in (laxer, stricter) if value is not None]
        return ThresholdStats(AcceptanceModel(sum(found) / len(found) if found else ERROR_RATE))
