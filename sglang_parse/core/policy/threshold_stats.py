"""What is known of each threshold's drafts, and where drafting stands with it. Numbers only.

Requests differ: those whose last drafts were good for nothing have an account of their own. A
client may send any threshold, so the accounts used last are kept; one that is new begins as its
neighbours stand.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from sglang_parse.core.phases import DraftPlan
from sglang_parse.core.policy.acceptance import PRIOR, AcceptanceModel
from sglang_parse.core.policy.lru import used

COLD_START_PROBES = 3
"""Rounds of an unknown threshold before drafting is given up: one bad draft says little."""
MOST_FAILED = 3
"""Failures in a row that are told apart: one more makes no difference."""
MAX_ACCOUNTS = 128
"""StatsByThreshold kept, the ones used last."""

Key = tuple[float, int]
"""Of an account: its threshold, and how many drafts in a row were good for nothing."""


def stats_key(threshold: float, num_failed: int = 0) -> Key:
    return threshold, min(num_failed, MOST_FAILED)


@dataclass(slots=True)
class ThresholdStats:
    """One threshold, for requests of which so many drafts in a row were good for nothing.

    Attributes:
        cuts: where its drafts were cut.
        best: the plan that was best when it was last asked for; None before.
        num_asked: how often one was asked for since.
        at_load: the load then, in steps by which it is told apart; ``at_rounds``: its rounds then;
            ``at_ms``: the time of stages by then.
        cold_start_probes: rounds it still needs before drafting may be given up.
        is_suspended: drafting did not pay when it was last asked.
        waiting: drafts not begun since a pilot was sent; None while none is under way.
        probe_budget_ms: what a trial may lose by now.
    """

    cuts: AcceptanceModel
    best: DraftPlan | None = None
    num_asked: int = 0
    at_load: int = 0
    at_rounds: int = 0
    at_ms: float = 0.0
    cold_start_probes: int = COLD_START_PROBES
    is_suspended: bool = False
    waiting: int | None = None
    probe_budget_ms: float = 0.0


@dataclass(slots=True)
class StatsByThreshold:
    """Those of one server."""

    _kept: OrderedDict[Key, ThresholdStats] = field(default_factory=OrderedDict)

    def of(self, key: Key) -> ThresholdStats:
        """One that is new is opened."""
        return used(self._kept, key, lambda: self._opened(*key), MAX_ACCOUNTS)

    def get(self, key: Key) -> ThresholdStats | None:
        """Where it is kept; asking does not make it used."""
        return self._kept.get(key)

    def _opened(self, threshold: float, num_failed: int) -> ThresholdStats:
        """As its neighbours stand: a stricter threshold keeps no more, a laxer one no less; and one
        more failure changes little."""
        if num_failed:
            before = self.of(stats_key(threshold, num_failed - 1))
            return ThresholdStats(AcceptanceModel(before.cuts.hazard), cold_start_probes=0)
        known = {
            value: account.cuts.hazard
            for (value, failed), account in self._kept.items()
            if not failed and not account.cold_start_probes
        }
        laxer = max((value for value in known if value <= threshold), default=None)
        stricter = min((value for value in known if value >= threshold), default=None)
        found = [known[value] for value in (laxer, stricter) if value is not None]
        return ThresholdStats(AcceptanceModel(sum(found) / len(found) if found else PRIOR))
