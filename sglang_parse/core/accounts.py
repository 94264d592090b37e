"""What is known of each threshold's drafts, and where drafting stands with it. Numbers only.

Requests differ: those whose last drafts were good for nothing have an account of their own. A
client may send any threshold, so the accounts used last are kept; one that is new begins as its
neighbours stand.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from sglang_parse.core.cuts import PRIOR, Cuts
from sglang_parse.core.phases import RoundPlan
from sglang_parse.core.recent import used

PILOTS = 3
"""Rounds of an unknown threshold before drafting is given up: one bad draft says little."""
MOST_FAILED = 3
"""Failures in a row that are told apart: one more makes no difference."""
MAX_ACCOUNTS = 128
"""Accounts kept, the ones used last."""

Key = tuple[float, int]
"""Of an account: its threshold, and how many drafts in a row were good for nothing."""


def account_of(threshold: float, num_failed: int = 0) -> Key:
    return threshold, min(num_failed, MOST_FAILED)


@dataclass(slots=True)
class Account:
    """One threshold, for requests of which so many drafts in a row were good for nothing.

    Attributes:
        cuts: where its drafts were cut.
        best: the plan that was best when it was last asked for; None before.
        num_asked: how often one was asked for since.
        at_load: the load then, in steps by which it is told apart; ``at_rounds``: its rounds then;
            ``at_ms``: the time of stages by then.
        pilots: rounds it still needs before drafting may be given up.
        is_off: drafting did not pay when it was last asked.
        waiting: drafts not begun since a pilot was sent; None while none is under way.
        to_spend_ms: what a trial may lose by now.
    """

    cuts: Cuts
    best: RoundPlan | None = None
    num_asked: int = 0
    at_load: int = 0
    at_rounds: int = 0
    at_ms: float = 0.0
    pilots: int = PILOTS
    is_off: bool = False
    waiting: int | None = None
    to_spend_ms: float = 0.0


@dataclass(slots=True)
class Accounts:
    """Those of one server."""

    _kept: OrderedDict[Key, Account] = field(default_factory=OrderedDict)

    def of(self, key: Key) -> Account:
        """One that is new is opened."""
        return used(self._kept, key, lambda: self._opened(*key), MAX_ACCOUNTS)

    def get(self, key: Key) -> Account | None:
        """Where it is kept; asking does not make it used."""
        return self._kept.get(key)

    def _opened(self, threshold: float, num_failed: int) -> Account:
        """As its neighbours stand: a stricter threshold keeps no more, a laxer one no less; and one
        more failure changes little."""
        if num_failed:
            before = self.of(account_of(threshold, num_failed - 1))
            return Account(Cuts(before.cuts.hazard), pilots=0)
        known = {
            value: account.cuts.hazard
            for (value, failed), account in self._kept.items()
            if not failed and not account.pilots
        }
        laxer = max((value for value in known if value <= threshold), default=None)
        stricter = min((value for value in known if value >= threshold), default=None)
        found = [known[value] for value in (laxer, stricter) if value is not None]
        return Account(Cuts(sum(found) / len(found) if found else PRIOR))
