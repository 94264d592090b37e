"""Schedule: what every running request does in the next iteration, and with which KV slots.

    [0, kv_committed_len)                  final KV of prompt and output; the radix cache takes it
    [kv_committed_len, kv_allocated_len)   lookahead slots of the next action, ``core.kv_demand``
    [kv_allocated_len, row width)          nothing

The anchor, the last output token, has no KV yet: its slot is the first lookahead slot. SGLang
advances ``kv_committed_len`` when it processes a result; ``RequestState.committed_len`` is an
iteration ahead of it under overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.allocation import alloc_for_spec_decode
from sglang.srt.runtime_context import get_spec

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.kv_demand import (
    KvDemand,
    KvGrant,
    allocate_kv_slots,
    cost,
    lookahead_slots,
    pages_up,
)
from sglang_parse.core.phases import Action, Phase
from sglang_parse.core.policy.controller import Controller
from sglang_parse.core.request import RequestState
from sglang_parse.device import on_device
from sglang_parse.engine.batch import slots_of
from sglang_parse.engine.requests import draft_budget, has_ended, indices_by_action, takes_proposal
from sglang_parse.engine.sglang_types import Req, ScheduleBatch


@dataclass(frozen=True, slots=True)
class IterationPlan:
    """Plan of one iteration.

    Attributes:
        reqs: the requests; ``available``: free slots when it was made.
        grants: per request its action and slots.
        draft_chunk: draft tokens per drafting request.
        num_required: slots that it takes from the pool.
    """

    reqs: tuple[Req, ...]
    available: int
    grants: Sequence[KvGrant]
    draft_chunk: int
    num_required: int


class Schedule:
    """Plans the iterations of one server.

    Args:
        max_question_len: tokens of the longest question; 0 in token mode.
    """

    def __init__(self, config: ParseConfig, controller: Controller, max_question_len: int) -> None:
        self.config, self.controller = config, controller
        self.max_question_len, kinds = max_question_len, controller.blocks.costs
        self.block_size = max(kind.size for kind in kinds)
        """Tokens that a draft forward may write."""
        self.max_questions = config.max_questions  # of every plan
        self.max_verified = 0
        """Drafts that a pass may verify; 0 for any number."""
        lookahead = max(kind.lookahead_rows for kind in kinds)
        self.block_rows = 1 + lookahead if self.block_size > 1 else 0
        self._planned: IterationPlan | None = None

    def plan_iteration(self, batch: ScheduleBatch, reqs: Sequence[Req]) -> IterationPlan:
        """Plans the next iteration of ``reqs``; changes no state.

        SGLang asks up to three times per iteration (launch before sync, capacity check,
        allocation); ``invalidate`` ends the plan's life.
        """
        available = _available_slots(batch.tree_cache)
        planned = self._planned
        if planned is None or planned.available != available or planned.reqs != (*reqs,):
            self._planned = planned = self._plan(batch, reqs, available)
        return planned

    def all_take(self, action: Action, batch: ScheduleBatch, reqs: Sequence[Req]) -> bool:
        """Whether all of ``reqs`` take the action next, for which KV suffices."""
        grants = self.plan_iteration(batch, reqs).grants
        return all(grant.action is action for grant in grants)

    def invalidate(self) -> None:
        """A request's state has changed."""
        self._planned = None

    def apply(self, batch: ScheduleBatch) -> int:
        """Every running request takes its action, with exactly the slots that it needs.

        Returns:
            Draft tokens per drafting request.

        Source: ``sglang.srt.speculative.eagle_utils.eagle_prepare_for_decode``.
        """
        plan = self.plan_iteration(batch, batch.reqs)
        self.invalidate()
        # After planning: SGLang has checked this plan, and one with more slots may not fit.
        batch.maybe_evict_swa()
        for req in batch.reqs:
            req.decode_batch_idx += 1
        _take(batch, plan.grants)
        _allocate(batch, plan.grants)
        return plan.draft_chunk

    def _plan(self, batch: ScheduleBatch, reqs: Sequence[Req], available: int) -> IterationPlan:
        page_size = batch.token_to_kv_pool_allocator.page_size
        demands = [self._demand(req) for req in reqs]
        grants = allocate_kv_slots(demands, available, page_size)
        draft_chunk = self._limit(reqs, grants)
        required = max(0, cost(demands, grants, page_size))
        return IterationPlan((*reqs,), available, grants, draft_chunk, required)

    def _limit(self, reqs: Sequence[Req], grants: list[KvGrant]) -> int:
        """Bounds latency: some drafts wait, for their verify pass or for more draft tokens.

        Returns:
            Draft tokens per drafting request.
        """
        by_action = indices_by_action([grant.action for grant in grants])
        decoding = [*by_action[Action.DECODE], *by_action[Action.PROPOSE]]
        drafting, complete = by_action[Action.DRAFT], by_action[Action.VERIFY]
        complete.sort(key=lambda i: -reqs[i].parse_state.waited)
        has_waited = any(reqs[i].parse_state.waited for i in complete)
        may_join = bool(complete) and not decoding and not has_waited
        draft_chunk, num_verified = self.controller.limit_iteration(
            len(drafting),
            [reqs[i].parse_state.draft.num_rows for i in complete],
            len(decoding),
            sum(_is_plain(reqs[i]) for i in decoding),
            may_join=may_join and all(self._completes_soon(reqs[i]) for i in drafting),
        )
        num_verified = min(num_verified, self.max_verified or num_verified)
        waiting = complete[num_verified:] + ([] if draft_chunk else drafting)
        for i in waiting:
            grants[i] = KvGrant(Action.WAIT, None)
        return draft_chunk

    def _completes_soon(self, req: Req) -> bool:
        """Whether one more iteration completes the request's draft."""
        state = req.parse_state
        num_drafted = state.num_drafted + state.num_draft_inflight
        budget = draft_budget(req, self.config.draft_tokens)
        return num_drafted + self.controller.limits.draft_chunk >= budget

    def _demand(self, req: Req) -> KvDemand:
        """KV slots that the request has and needs; one before its first prefill is processed."""
        state: RequestState | None = getattr(req, "parse_state", None)
        kv = req.kv
        if state is None:
            return KvDemand(Phase.PLAIN, kv.kv_committed_len, kv.kv_allocated_len, 1)
        committed, allocated = state.committed_len, kv.kv_allocated_len
        if has_ended(req):
            return KvDemand(state.phase, committed, allocated, 0, has_ended=True)
        proposes = takes_proposal(req)
        room = state.draft.room
        rows = 1 + get_spec().speculative_num_steps + room if proposes else 1
        budget = draft_budget(req, self.config.draft_tokens)
        chunk = self.controller.limits.draft_chunk
        # The block that completes a chunk is accepted whole.
        longest_draft = lookahead_slots(state, chunk + self.block_size - 1, budget, rows)
        max_prefixes = state.plan.max_prefixes if state.plan else self.config.max_prefixes
        num_questions = min(max_prefixes, longest_draft, self.max_questions)
        return KvDemand(
            phase=state.phase,
            committed=committed,
            allocated=allocated,
            lookahead_slots=lookahead_slots(state, chunk, budget, rows, self.block_rows),
            max_verify_slots=1
            + longest_draft
            + max(room, self.block_size - 1)  # a text goes on, or candidates are compared
            + num_questions * self.max_question_len,
            num_drafted=state.num_drafted + state.num_draft_inflight,
            waited=state.waited,
            proposes=proposes,
            room=room,
        )


def _available_slots(cache: Any) -> int:
    """Slots that are free, or that ``cache`` would give up: a token takes one of each KV pool."""
    allocator = cache.token_to_kv_pool_allocator
    if not cache.supports_swa():
        return allocator.available_size() + cache.evictable_size()
    return min(
        allocator.full_available_size() + cache.full_evictable_size(),
        allocator.swa_available_size() + cache.swa_evictable_size(),
    )


def _is_plain(req: Req) -> bool:
    state: RequestState | None = getattr(req, "parse_state", None)
    return state is not None and state.phase is Phase.PLAIN


def _take(batch: ScheduleBatch, grants: Sequence[KvGrant]) -> None:
    """The requests take their actions; those that give up a draft free its slots."""
    freed = []
    for req, grant in zip(batch.reqs, grants, strict=True):
        state, is_step = req.parse_state, grant.action is Action.DECODE
        frees = is_step and (grant.cuts_draft or takes_proposal(req))
        state.take(grant.action, grant.lookahead_slots or 0, cuts_draft=grant.cuts_draft)
        if frees:
            freed.append((req, state.committed_len + 1))
    free_slots(batch.tree_cache, freed)


def _allocate(batch: ScheduleBatch, grants: Sequence[KvGrant]) -> None:
    page_size = batch.token_to_kv_pool_allocator.page_size
    held = [req.kv.kv_allocated_len for req in batch.reqs]
    needed = [
        max(have, pages_up(req.parse_state.committed_len + (g.lookahead_slots or 0), page_size))
        for have, req, g in zip(held, batch.reqs, grants, strict=True)
    ]
    alloc_for_spec_decode(
        batch.tree_cache,
        batch.req_to_token_pool,
        reqs=batch.reqs,
        req_pool_indices=batch.req_pool_indices,
        cur_kv_lens=on_device(held, batch.device, torch.int32),
        cur_kv_lens_cpu=torch.tensor(held, dtype=torch.int32),
        nxt_kv_lens=on_device(needed, batch.device, torch.int32),
        nxt_kv_lens_cpu=torch.tensor(needed, dtype=torch.int32),
        num_needed_tokens=sum(needed) - sum(held),
        batch=batch,
    )


def free_slots(cache: Any, lengths: Sequence[tuple[Req, int]]) -> None:
    """Frees requests' slots, each from a length on, in one call: KV of rejected drafts and of
    questions, ahead of all that windows have freed.

    Question KV cannot outlive its pass, because nothing owns its slots. A page whose first slots
    are in use is retained."""
    allocator, reqs, spans = cache.token_to_kv_pool_allocator, list[Req](), list[tuple[int, int]]()
    for req, length in lengths:
        start, end = (pages_up(n, allocator.page_size) for n in (length, req.kv.kv_allocated_len))
        if start < end:
            reqs.append(req)
            spans.append((start, end))
            req.kv.kv_allocated_len = start
    if reqs:  # whole pages of several requests are freed as those of one
        allocator.free_segment(slots_of(cache.req_to_token_pool, reqs, spans), start_pos=0)


def free_lookahead(cache: Any, req: Req) -> None:
    """Frees what a request that ends or is retracted has ahead of its committed tokens.

    To SGLang all tokens up to ``kv_allocated_len`` have KV then: a streaming session's next turn
    starts behind them.
    """
    free_slots(cache, [(req, req.kv.kv_committed_len)])
    req.kv.kv_allocated_len = min(req.kv.kv_allocated_len, req.kv.kv_committed_len)
