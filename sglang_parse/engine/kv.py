"""KV slots: who owns which part of a request's row, taken for one iteration at a time.

    [0, kv_committed_len)                  final KV of prompt and output; the radix cache takes it
    [kv_committed_len, kv_allocated_len)   slots for what the request does next, see ``core.kv_demand``
    [kv_allocated_len, row width)          nothing

The last output token (the anchor) has no KV yet: its slot is the first of the middle part.
SGLang advances ``kv_committed_len`` itself when it processes a result; PARSE goes by its own
``RequestState.committed_len``, which under overlap is an iteration ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.allocation import alloc_for_spec_decode
from sglang.srt.runtime_context import get_spec

from sglang_parse.core.block import Masks, lookahead_rows
from sglang_parse.core.config import ParseConfig
from sglang_parse.core.kv_demand import KvDemand, KvGrant, allocate_kv_slots, cost, pages_up
from sglang_parse.core.phases import Action, Phase
from sglang_parse.core.policy.controller import Controller
from sglang_parse.core.request import RequestState, lookahead_slots
from sglang_parse.device import on_device
from sglang_parse.engine.batch import draft_budget, has_ended, is_accelerated


class KvSlots:
    """Gives the running requests the slots of their next moves.

    Args:
        config: the server's settings.
        controller: how long bursts are, and how many drafts a pass judges.
        longest_question: tokens of the longest question a pass may ask; 0 in token mode.
        block_size: tokens a draft forward may write.
    """

    def __init__(
        self,
        config: ParseConfig,
        controller: Controller,
        longest_question: int,
        block_size: int = 1,
    ) -> None:
        self.config = config
        self.controller = controller
        self.longest_question = longest_question
        self.block_size = block_size
        self.block_rows = 1 + lookahead_rows(block_size, Masks.EVERY) if block_size > 1 else 0

    def required(self, batch: Any, requests: Sequence[Any], page_size: int) -> int:
        """Slots the next iteration takes for ``requests``: SGLang's capacity check.

        More than there are only where plain decoding would not fit either; then SGLang retracts.
        Twin of ``grant``. Source: ``ScheduleBatch._new_tokens_required_next_decode_spec_v2``.
        """
        holdings = [self._holding(req) for req in requests]
        grants = allocate_kv_slots(holdings, _available(batch), page_size)
        return max(0, cost(holdings, grants, page_size))

    def all_burst(self, batch: Any, requests: Sequence[Any]) -> bool:
        """Whether there is room for all of ``requests`` to draft on."""
        page_size = batch.token_to_kv_pool_allocator.page_size
        holdings = [self._holding(req) for req in requests]
        grants = allocate_kv_slots(holdings, _available(batch), page_size)
        return all(grant.action is Action.DRAFT for grant in grants)

    def grant(self, batch: Any) -> int:
        """Decide every running request's move and allocate what it needs, and nothing more.

        Returns:
            Draft tokens of this iteration's burst.

        Source: ``sglang.srt.speculative.eagle_utils.eagle_prepare_for_decode``.
        """
        page_size = batch.token_to_kv_pool_allocator.page_size
        holdings = [self._holding(req) for req in batch.reqs]
        grants = allocate_kv_slots(holdings, _available(batch), page_size)
        draft_chunk = self._make_wait(batch, grants)
        for req, grant in zip(batch.reqs, grants, strict=True):
            req.decode_batch_idx += 1
            _take(batch, req, grant)
        _allocate(batch, grants, page_size)
        return draft_chunk

    def _make_wait(self, batch: Any, grants: list[KvGrant]) -> int:
        """Some drafts wait, for their pass or to be written on, where the iteration would keep
        others waiting too long.

        Returns:
            Draft tokens of its burst.
        """
        moves = [grant.action for grant in grants]
        stepping = [
            i for i, move in enumerate(moves) if move in (Action.DECODE, Action.EAGLE_DECODE)
        ]
        over = [i for i, move in enumerate(moves) if move is Action.VERIFY]
        over.sort(key=lambda i: -batch.reqs[i].parse_state.waited)
        drafting = [i for i, move in enumerate(moves) if move is Action.DRAFT]
        has_waited = any(batch.reqs[i].parse_state.waited for i in over)
        # Asked of nobody in an iteration of bursts alone: there are many.
        may_join = bool(over) and not stepping and not has_waited
        draft_chunk, num_judged = self.controller.limit_iteration(
            len(drafting),
            [batch.reqs[i].parse_state.draft.num_rows for i in over],
            len(stepping),
            sum(_is_plain(batch.reqs[i]) for i in stepping),
            may_join=may_join and all(self._ends_soon(batch.reqs[i]) for i in drafting),
        )
        waiting = over[num_judged:] if draft_chunk else [*over[num_judged:], *drafting]
        for i in waiting:
            grants[i] = KvGrant(Action.WAIT, None)
        return draft_chunk

    def _ends_soon(self, req: Any) -> bool:
        """Whether a burst more ends the request's draft."""
        state: RequestState = req.parse_state
        num_drafted = state.num_drafted + state.num_draft_inflight
        budget = draft_budget(req, self.config.draft_tokens)
        return num_drafted + self.controller.draft_chunk >= budget

    def _holding(self, req: Any) -> KvDemand:
        """What the request holds and wants.

        Before a request's first prefill result is processed it has no state; one slot serves it.
        """
        state: RequestState | None = getattr(req, "parse_state", None)
        kv = req.kv
        if state is None:
            return KvDemand(Phase.PLAIN, kv.kv_committed_len, kv.kv_allocated_len, tail=1)
        committed, allocated = state.committed_len, kv.kv_allocated_len
        if has_ended(req):
            return KvDemand(state.phase, committed, allocated, tail=0, has_ended=True)
        accelerated = is_accelerated(req)
        rows = 1 + get_spec().speculative_num_steps if accelerated else 1
        budget = draft_budget(req, self.config.draft_tokens)
        draft_chunk = self.controller.draft_chunk
        tail = lookahead_slots(state, draft_chunk, budget, rows, self.block_rows)
        # The block that fills a burst is kept whole.
        longest_draft = lookahead_slots(state, draft_chunk + self.block_size - 1, budget, rows)
        most = state.plan.max_prefixes if state.plan else self.config.max_prefixes
        num_questions = min(most, longest_draft)
        return KvDemand(
            phase=state.phase,
            committed=committed,
            allocated=allocated,
            tail=tail,
            max_verify_slots=1 + longest_draft + num_questions * self.longest_question,
            num_drafted=state.num_drafted + state.num_draft_inflight,
            waited=state.waited,
            is_accelerated=accelerated,
        )


def _is_plain(req: Any) -> bool:
    """Whether it never drafts; not known before its first prefill has been read."""
    state: RequestState | None = getattr(req, "parse_state", None)
    return state is not None and state.phase is Phase.PLAIN


def _available(batch: Any) -> int:
    tree_cache = batch.tree_cache
    free = tree_cache.token_to_kv_pool_allocator.available_size()
    return free + tree_cache.evictable_size()


def _take(batch: Any, req: Any, grant: KvGrant) -> None:
    """The request takes its move, and gives back what it gives up."""
    state: RequestState = req.parse_state
    stands_down = grant.action is Action.DECODE and is_accelerated(req)
    state.take(grant.action)
    if stands_down or grant.action is Action.DROP_DRAFT:
        release_tail(batch, req, state.committed_len + 1)


def _allocate(batch: Any, grants: Sequence[KvGrant], page_size: int) -> None:
    held = [req.kv.kv_allocated_len for req in batch.reqs]
    wanted = [
        max(have, pages_up(req.parse_state.committed_len + (grant.tail or 0), page_size))
        for have, req, grant in zip(held, batch.reqs, grants, strict=True)
    ]
    alloc_for_spec_decode(
        batch.tree_cache,
        batch.req_to_token_pool,
        reqs=batch.reqs,
        req_pool_indices=batch.req_pool_indices,
        cur_kv_lens=on_device(held, batch.device, torch.int32),
        cur_kv_lens_cpu=torch.tensor(held, dtype=torch.int32),
        nxt_kv_lens=on_device(wanted, batch.device, torch.int32),
        nxt_kv_lens_cpu=torch.tensor(wanted, dtype=torch.int32),
        num_needed_tokens=sum(wanted) - sum(held),
        batch=batch,
    )


def release_tail(batch: Any, req: Any, keep_len: int) -> None:
    """Give back the slots from ``keep_len`` on: rejected draft and question KV.

    Nothing can read question KV after its pass, because nothing owns it. A page whose first
    slots are kept is kept whole.
    """
    allocated = req.kv.kv_allocated_len
    keep_len = pages_up(keep_len, batch.token_to_kv_pool_allocator.page_size)
    if keep_len >= allocated:
        return
    table = batch.req_to_token_pool.req_to_token
    slots = table[req.kv.req_pool_idx, keep_len:allocated].to(torch.int64)
    batch.tree_cache.token_to_kv_pool_allocator.free(slots)
    req.kv.kv_allocated_len = keep_len
