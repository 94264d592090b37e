"""Who moves how far in the next iteration, and with how many KV slots. No tensors.

With room for everyone each request makes its phase's move. When slots are short, the target goes
on without its EAGLE-3 head, and drafts give way before any request is retracted: first they are
judged as they are, then they wait for slots that another pass gives back, at last they are given
up and the target writes on. SGLang retracts only what plain decoding could not hold either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_parse.core.phases import STEPPING, Action, Phase

PATIENCE = 8
"""Iterations in a row a request may wait for slots before its draft is given up."""


_OWN_MOVE = {
    Phase.DRAFTING: Action.DRAFT,
    Phase.VERIFYING: Action.VERIFY,
    Phase.DECODING: Action.DECODE,
    Phase.PLAIN: Action.DECODE,
}


@dataclass(frozen=True, slots=True)
class KvDemand:
    """One request before the next iteration. Lengths in tokens.

    Attributes:
        phase: its phase.
        committed, allocated: tokens whose KV is final, and SGLang's ``kv_allocated_len``.
        tail: slots behind the committed ones its phase's move needs (``request.lookahead_slots``).
        max_verify_slots: while it drafts, the most slots behind the committed ones that judging the
            draft after this burst can need.
        num_drafted: draft tokens it holds.
        waited: iterations in a row it has waited.
        is_accelerated: its move is made with an EAGLE-3 head, ``tail`` counts what that needs.
        has_ended: its answer is over; SGLang takes its slots back after this iteration.
    """

    phase: Phase
    committed: int
    allocated: int
    tail: int
    max_verify_slots: int = 0
    num_drafted: int = 0
    waited: int = 0
    is_accelerated: bool = False
    has_ended: bool = False


@dataclass(frozen=True, slots=True)
class KvGrant:
    """What one request may do.

    Attributes:
        action: its action.
        tail: slots behind the committed ones it holds during the iteration, before rounding
            up to pages; None where it keeps what it has.
    """

    action: Action
    tail: int | None


def allocate_kv_slots(
    holdings: Sequence[KvDemand], available: int, page_size: int = 1
) -> list[KvGrant]:
    """A grant per request.

    Args:
        holdings: the running requests.
        available: slots nobody holds, those the radix cache can evict included.
        page_size: slots are taken and given back in whole pages of this many.
    """
    going_on = [holding for holding in holdings if not holding.has_ended]
    frees_soon = len(going_on) < len(holdings)
    grants = iter(_allocate(going_on, available, page_size, frees_soon))
    return [KvGrant(Action.WAIT, None) if h.has_ended else next(grants) for h in holdings]


def _allocate(
    holdings: Sequence[KvDemand], available: int, page_size: int, frees_soon: bool
) -> list[KvGrant]:
    """``allocate_kv_slots`` among those that go on; ``frees_soon``: others give their slots back."""
    reserve = max((_judging_cost(h, page_size) for h in holdings), default=0)
    for accelerate in (True, False):
        full = [_wish(h, accelerate) for h in holdings]
        if cost(holdings, full, page_size) + reserve <= available:
            return full
    return _Shortage(holdings, available, page_size, reserve, frees_soon).allocate_kv_slots()


def _wish(holding: KvDemand, accelerate: bool) -> KvGrant:
    if holding.is_accelerated:
        return (
            KvGrant(Action.EAGLE_DECODE, holding.tail) if accelerate else KvGrant(Action.DECODE, 1)
        )
    return KvGrant(_OWN_MOVE[holding.phase], holding.tail)


def cost(holdings: Sequence[KvDemand], grants: Sequence[KvGrant], page_size: int = 1) -> int:
    """Slots the grants take from the pool, less what given-up drafts return; may be negative."""
    return sum(_cost(h, g, page_size) for h, g in zip(holdings, grants, strict=True))


def _cost(holding: KvDemand, grant: KvGrant, page_size: int) -> int:
    if grant.tail is None:
        return 0
    held = pages_up(holding.allocated, page_size)
    wanted = pages_up(holding.committed + grant.tail, page_size)
    # A step in the place of an accelerated one gives back what the last of those left over.
    gives_back = grant.action is Action.DROP_DRAFT or (
        grant.action is Action.DECODE and holding.is_accelerated
    )
    return wanted - held if gives_back else max(0, wanted - held)


def _judging_cost(holding: KvDemand, page_size: int) -> int:
    """Slots to keep free so that the draft of one burst more can be judged."""
    if holding.phase is not Phase.DRAFTING:
        return 0
    return pages_up(max(0, holding.max_verify_slots - holding.tail), page_size)


def pages_up(length: int, page_size: int) -> int:
    """``length`` rounded up to whole pages."""
    return -(-length // page_size) * page_size


class _Shortage:
    """Sharing out when not everyone can make its move."""

    def __init__(
        self,
        holdings: Sequence[KvDemand],
        available: int,
        page_size: int,
        reserve: int,
        frees_soon: bool,
    ) -> None:
        self.holdings, self.left = holdings, available
        self.page_size, self.reserve, self.frees_soon = page_size, reserve, frees_soon
        self.grants: dict[int, KvGrant] = {}

    def allocate_kv_slots(self) -> list[KvGrant]:
        # Steps first: they are what ends requests and returns whole rows of slots.
        for i in self._in(*STEPPING):
            self._give(i, KvGrant(Action.DECODE, 1))
        # A pass returns slots in the same iteration: those who waited longest go first.
        waiting = sorted(self._in(Phase.VERIFYING), key=lambda i: -self.holdings[i].waited)
        for i in waiting:
            self._give(i, self._judged(self.holdings[i]))
        for i in self._in(Phase.DRAFTING):
            self._give(i, self._drafted(self.holdings[i]))
        self._give_up_until_something_moves()
        return [self.grants[i] for i in range(len(self.holdings))]

    def _in(self, *phases: Phase) -> list[int]:
        return [i for i, h in enumerate(self.holdings) if h.phase in phases]

    def _give(self, index: int, grant: KvGrant) -> None:
        self.left -= _cost(self.holdings[index], grant, self.page_size)
        self.grants[index] = grant

    def _judged(self, holding: KvDemand) -> KvGrant:
        grant = KvGrant(Action.VERIFY, holding.tail)
        if _cost(holding, grant, self.page_size) <= self.left:
            return grant
        return (
            KvGrant(Action.DROP_DRAFT, 1)
            if holding.waited >= PATIENCE
            else KvGrant(Action.WAIT, None)
        )

    def _drafted(self, holding: KvDemand) -> KvGrant:
        grant = KvGrant(Action.DRAFT, holding.tail)
        if _cost(holding, grant, self.page_size) + self.reserve <= self.left:
            return grant
        return (
            KvGrant(Action.END_DRAFT, None)
            if holding.num_drafted
            else KvGrant(Action.DROP_DRAFT, 1)
        )

    def _give_up_until_something_moves(self) -> None:
        """Drop drafts, the shortest first, while slots are overdrawn or nobody moves.

        Slots that come back after this iteration are as good as somebody who moves.
        """
        idle = (Action.WAIT, Action.END_DRAFT)
        shortest_first = sorted(self.grants, key=lambda i: self.holdings[i].num_drafted)
        for i in shortest_first:
            somebody_moves = any(grant.action not in idle for grant in self.grants.values())
            if self.left >= 0 and (somebody_moves or self.frees_soon):
                return
            if self.grants[i].action in idle:
                self._give(i, KvGrant(Action.DROP_DRAFT, 1))
