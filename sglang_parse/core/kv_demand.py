"""Actions and KV slots of the next iteration, for all running requests. No tensors.

With enough slots each request takes its phase's action. When KV is short, texts extend no proposal;
then no head proposes, and drafts give way before SGLang retracts a request: they are verified as
they are, then wait for slots that another verify pass frees, and are dropped at last. SGLang
retracts only what plain decoding could not hold either.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from sglang_parse.core.phases import TARGET_DECODES, Action, Phase
from sglang_parse.core.request import RequestState

PATIENCE = 8
"""Consecutive iterations that a complete draft waits for slots before it is dropped."""

_ACTIONS = {
    Phase.DRAFTING: Action.DRAFT,
    Phase.VERIFYING: Action.VERIFY,
    Phase.DECODING: Action.DECODE,
    Phase.PLAIN: Action.DECODE,
}


@dataclass(frozen=True, slots=True)
class KvDemand:
    """KV slots that one request has and needs. Lengths in tokens.

    committed 100, 20 tokens of a draft so far, 16 more in this iteration: lookahead_slots 36, for
    the anchor and 35 draft tokens, as the last one has no KV yet; max_verify_slots 37 and its
    questions' tokens, so that no chunk begins that could not be verified.

    Attributes:
        committed: tokens with final KV; ``allocated``: SGLang's ``kv_allocated_len``.
        lookahead_slots: slots after the committed ones that its action needs.
        max_verify_slots: while it drafts, the most slots after the committed ones that verifying
            the draft after this iteration can need.
        num_drafted: draft tokens it holds.
        waited: consecutive iterations it has waited.
        proposes: an EAGLE-3 head proposes for it, which ``lookahead_slots`` covers.
        room: those of ``lookahead_slots`` that a text may extend its proposal by.
        has_ended: it is finished; SGLang frees its slots after this iteration.
    """

    phase: Phase
    committed: int
    allocated: int
    lookahead_slots: int
    max_verify_slots: int = 0
    num_drafted: int = 0
    waited: int = 0
    proposes: bool = False
    room: int = 0
    has_ended: bool = False


@dataclass(frozen=True, slots=True)
class KvGrant:
    """Action of one request.

    Attributes:
        lookahead_slots: slots after the committed ones during the iteration, before rounding up to
            pages; None retains the allocation.
        cuts_draft: KV is short: the draft ends here, and is verified next; or, if the target
            decodes, is dropped.
    """

    action: Action
    lookahead_slots: int | None
    cuts_draft: bool = False


DROPPED = KvGrant(Action.DECODE, 1, cuts_draft=True)


def lookahead_slots(
    state: RequestState,
    draft_chunk: int,
    draft_budget: int,
    decode_rows: int = 1,
    block_rows: int = 0,
) -> int:
    """KV slots that a request needs after its committed ones in the next iteration.

    Args:
        draft_chunk: draft tokens per iteration.
        draft_budget: draft tokens that the request may hold in this round.
        decode_rows: rows of a decode step: the anchor, and what an EAGLE-3 head proposes.
        block_rows: rows of a parallel draft forward, which may start after the last draft token.
    """
    if state.phase is Phase.WAITING:
        return 0
    if state.phase is Phase.DRAFTING:
        num_drafted = state.num_drafted + state.num_draft_inflight
        return min(num_drafted + draft_chunk, draft_budget) + block_rows
    if state.phase is Phase.VERIFYING:
        # A carry-over needs the draft model's KV of unverified draft tokens.
        return max(1 + state.num_drafted, state.draft.num_rows)
    return decode_rows


def allocate_kv_slots(
    demands: Sequence[KvDemand], available: int, page_size: int = 1
) -> list[KvGrant]:
    """Grants each request an action and its slots.

    Args:
        available: free slots, including those that the radix cache can evict.
        page_size: slots are allocated and freed in pages of this size.
    """
    running = [demand for demand in demands if not demand.has_ended]
    frees_soon = len(running) < len(demands)
    grants = iter(_allocate(running, available, page_size, frees_soon))
    return [KvGrant(Action.WAIT, None) if d.has_ended else next(grants) for d in demands]


def _allocate(
    demands: Sequence[KvDemand], available: int, page_size: int, frees_soon: bool
) -> list[KvGrant]:
    reserve = max((_verify_reserve(d, page_size) for d in demands), default=0)
    for parts in (("proposal", "room"), ("proposal",), ()):
        grants = [_full_grant(d, parts) for d in demands]
        if cost(demands, grants, page_size) + reserve <= available:
            return grants
    return _Shortage(demands, available, page_size, reserve, frees_soon).allocate()


def _full_grant(demand: KvDemand, parts: Collection[str]) -> KvGrant:
    if demand.phase is Phase.WAITING:
        return KvGrant(Action.WAIT, None)
    if not demand.proposes:
        return KvGrant(_ACTIONS[demand.phase], demand.lookahead_slots)
    if "proposal" in parts:
        num_less = 0 if "room" in parts else demand.room
        return KvGrant(Action.PROPOSE, demand.lookahead_slots - num_less)
    return KvGrant(Action.DECODE, 1)


def cost(demands: Sequence[KvDemand], grants: Sequence[KvGrant], page_size: int = 1) -> int:
    """Slots that the grants take from the pool, minus those they free; may be negative."""
    return sum(_cost(d, g, page_size) for d, g in zip(demands, grants, strict=True))


def _cost(demand: KvDemand, grant: KvGrant, page_size: int) -> int:
    if grant.lookahead_slots is None:
        return 0
    held = pages_up(demand.allocated, page_size)
    needed = pages_up(demand.committed + grant.lookahead_slots, page_size)
    # A decode step in place of a proposal frees what the last one left over.
    frees = grant.action is Action.DECODE and (grant.cuts_draft or demand.proposes)
    return needed - held if frees else max(0, needed - held)


def _verify_reserve(demand: KvDemand, page_size: int) -> int:
    """Slots to leave free, so that the draft can be verified after one more iteration."""
    if demand.phase is not Phase.DRAFTING:
        return 0
    return pages_up(max(0, demand.max_verify_slots - demand.lookahead_slots), page_size)


def pages_up(length: int, page_size: int) -> int:
    return -(-length // page_size) * page_size


@dataclass(slots=True)
class _Shortage:
    """Allocation when KV is too short for every action; ``left``: slots that are still free."""

    demands: Sequence[KvDemand]
    left: int
    page_size: int
    reserve: int
    frees_soon: bool
    grants: dict[int, KvGrant] = field(default_factory=dict)

    def allocate(self) -> list[KvGrant]:
        # Decode steps first: they finish requests, which frees all of their slots.
        for i in self._in(*TARGET_DECODES):
            self._grant(i, KvGrant(Action.DECODE, 1))
        # A verify pass frees slots in the same iteration: the longest wait goes first.
        for i in sorted(self._in(Phase.VERIFYING), key=lambda i: -self.demands[i].waited):
            self._grant(i, self._verify_grant(self.demands[i]))
        for i in self._in(Phase.WAITING):
            self._grant(i, KvGrant(Action.WAIT, None))
        for i in self._in(Phase.DRAFTING):
            self._grant(i, self._draft_grant(self.demands[i]))
        self._drop_drafts_until_progress()
        return [self.grants[i] for i in range(len(self.demands))]

    def _in(self, *phases: Phase) -> list[int]:
        return [i for i, demand in enumerate(self.demands) if demand.phase in phases]

    def _grant(self, index: int, grant: KvGrant) -> None:
        self.left -= _cost(self.demands[index], grant, self.page_size)
        self.grants[index] = grant

    def _verify_grant(self, demand: KvDemand) -> KvGrant:
        grant = KvGrant(Action.VERIFY, demand.lookahead_slots)
        if _cost(demand, grant, self.page_size) <= self.left:
            return grant
        if demand.waited >= PATIENCE:
            return DROPPED
        return KvGrant(Action.WAIT, None)

    def _draft_grant(self, demand: KvDemand) -> KvGrant:
        grant = KvGrant(Action.DRAFT, demand.lookahead_slots)
        if _cost(demand, grant, self.page_size) + self.reserve <= self.left:
            return grant
        return KvGrant(Action.WAIT, None, cuts_draft=True) if demand.num_drafted else DROPPED

    def _drop_drafts_until_progress(self) -> None:
        """Drops drafts, the shortest first, while slots are overdrawn or no request progresses.

        Slots that a finished request frees after this iteration count as progress.
        """
        for i in sorted(self.grants, key=lambda i: self.demands[i].num_drafted):
            progresses = any(grant.action is not Action.WAIT for grant in self.grants.values())
            if self.left >= 0 and (progresses or self.frees_soon):
                return
            if self.grants[i].action is Action.WAIT:
                self._grant(i, DROPPED)
