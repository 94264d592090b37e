"""KV slots and request bookkeeping: who owns which part of a request's row.

    [0, kv_committed_len)                  final KV of prompt and output; the radix cache takes it
    [kv_committed_len, kv_allocated_len)   slots for what the request does next, see grants
    [kv_allocated_len, row width)          nothing

The last output token (the anchor) has no KV yet: its slot is the first of the middle part.
SGLang advances ``kv_committed_len`` itself when it processes a result; PARSE goes by its own
``RequestState.committed_len``, which under overlap is an iteration ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from sglang.srt.mem_cache.allocation import alloc_for_spec_decode
from sglang.srt.runtime_context import get_spec, max_speculative_num_draft_tokens

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.request import STEPPING, Phase, RequestState, tail_len
from sglang_parse.core.slots import Grant, Holding, Move, cost, pages_up, share_out
from sglang_parse.device import on_device
from sglang_parse.engine import overlap


@lru_cache(maxsize=1)
def server_config() -> ParseConfig:
    """This process's settings; fixed once a server runs."""
    return ParseConfig.from_env()


def draft_budget(req: Any) -> int:
    """Draft tokens the request's current round may hold, at least 1."""
    return max(1, min(server_config().draft_tokens, tokens_left(req)))


@lru_cache(maxsize=1)
def longest_question() -> int:
    """Tokens of the longest question: what ``validate_server_args`` widened the rows by."""
    config = server_config()
    width = max_speculative_num_draft_tokens() or 0
    return max(0, width - 1 - config.draft_tokens) // config.max_prefixes


def is_accelerated(req: Any) -> bool:
    """Whether the target's next step for this request is made with the EAGLE-3 head.

    Not for an answer's last token: there is nothing to be ahead of.
    """
    state: RequestState = req.parse_state
    steps = state.phase in STEPPING and state.head is not None
    return steps and tokens_left(req) > 1


def tokens_left(req: Any) -> int:
    """Tokens until the request's length limit."""
    state: RequestState = req.parse_state
    return req.sampling_params.max_new_tokens - len(state.output_ids) - state.num_unread


def is_gone(req: Any) -> bool:
    """Whether SGLang has ended or retracted the request while an iteration with it was under way.

    Its slots are not its own any more, and what the iteration wrote is dropped.
    """
    return req.finished() or req.is_retracted


def has_ended(req: Any) -> bool:
    """Whether there is nothing to do but for SGLang to process what has been emitted.

    SGLang decides what ends a request. Should it have processed everything and go on, so does
    PARSE. Those that return sampling masks go on until then: SGLang wants a row for each.
    """
    state: RequestState = req.parse_state
    if req.return_sampling_mask:
        return False
    if state.fault:
        return True
    if len(state.output_ids) + state.num_unread <= len(req.output_ids):
        return False
    return tokens_left(req) <= 0 or is_stop_token(req, state.output_ids[-1])


def holding(req: Any) -> Holding:
    """What the request holds and wants, for ``grants``.

    Before a request's first prefill result is processed it has no state; one slot serves it.
    """
    state: RequestState | None = getattr(req, "parse_state", None)
    kv = req.kv
    if state is None:
        return Holding(Phase.PLAIN, kv.kv_committed_len, kv.kv_allocated_len, tail=1)
    if has_ended(req):
        return Holding(
            state.phase, state.committed_len, kv.kv_allocated_len, tail=0, has_ended=True
        )
    config = server_config()
    accelerated = is_accelerated(req)
    rows = 1 + get_spec().speculative_num_steps if accelerated else 1
    tail = tail_len(state, config.burst_tokens, draft_budget(req), rows)
    num_questions = min(config.max_prefixes, tail)
    return Holding(
        phase=state.phase,
        committed=state.committed_len,
        allocated=kv.kv_allocated_len,
        tail=tail,
        judged_tail=1 + tail + num_questions * longest_question(),
        num_drafted=len(state.draft.token_ids),
        waited=state.waited,
        is_accelerated=accelerated,
    )


def slots_required(batch: Any, requests: Sequence[Any], page_size: int) -> int:
    """Slots the next iteration takes for ``requests``: SGLang's capacity check.

    More than there are only where plain decoding would not fit either; then SGLang retracts.
    Twin of ``prepare_for_decode``. Source: ``_new_tokens_required_next_decode_spec_v2``.
    """
    overlap.pipeline().before_planning(requests)
    holdings = [holding(req) for req in requests]
    grants = share_out(holdings, _available(batch), page_size)
    return max(0, cost(holdings, grants, page_size))


def _available(batch: Any) -> int:
    tree_cache = batch.tree_cache
    free = tree_cache.token_to_kv_pool_allocator.available_size()
    return free + tree_cache.evictable_size()


def prepare_for_decode(batch: Any) -> None:
    """Decide every running request's move and allocate what it needs, and nothing more.

    Source: ``sglang.srt.speculative.eagle_utils.eagle_prepare_for_decode``.
    """
    overlap.pipeline().before_planning(batch.reqs)
    _count_penalties(batch)
    page_size = batch.token_to_kv_pool_allocator.page_size
    holdings = [holding(req) for req in batch.reqs]
    grants = share_out(holdings, _available(batch), page_size)
    for req, grant in zip(batch.reqs, grants, strict=True):
        req.decode_batch_idx += 1
        _apply(batch, req, grant)
    _allocate(batch, grants, page_size)


def _count_penalties(batch: Any) -> None:
    """``ScheduleBatch.cumulate_penalty_output_tokens`` over what the worker has read.

    Under overlap SGLang's own goes by a token that is one step old.
    """
    orchestrator = batch.sampling_info.penalizer_orchestrator
    if orchestrator.is_required:
        last_ids = [req.parse_state.output_ids[-1] for req in batch.reqs]
        orchestrator.cumulate_output_tokens(on_device(last_ids, batch.device))


def _apply(batch: Any, req: Any, grant: Grant) -> None:
    """Change the request's state as its grant says; give back what it gives up."""
    state: RequestState = req.parse_state
    state.move = grant.move
    state.waited = state.waited + 1 if grant.move is Move.WAIT else 0
    if grant.move is Move.JUDGE:
        state.stats.short_drafts += 1
        state.phase = Phase.VERIFYING
    elif grant.move is Move.GIVE_UP:
        state.stats.short_drafts += 1
        state.segment_start = len(state.output_ids)
        state.draft_kv_len = min(state.draft_kv_len, state.committed_len)
        state.continue_segment()
        release_tail(batch, req, state.committed_len + 1)
        state.move = Move.STEP
    elif grant.move is Move.STEP and is_accelerated(req):
        release_tail(batch, req, state.committed_len + 1)


def _allocate(batch: Any, grants: Sequence[Grant], page_size: int) -> None:
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


def sequence_slice(req: Any, start: int, end: int, draft: Sequence[int] = ()) -> list[int]:
    """Token ids [start, end) of prompt + output + draft."""
    prompt, output = req.origin_input_ids, req.parse_state.output_ids
    ids: list[int] = []
    for part in (prompt, output, draft):
        low, high = max(0, start), max(0, min(end, len(part)))
        ids.extend(part[low:high])
        start, end = start - len(part), end - len(part)
    return ids


def is_stop_token(req: Any, token_id: int) -> bool:
    """Whether SGLang would end the request at this token.

    Source: ``Req._check_token_based_finish``. Stop strings are left to SGLang, which looks at
    the tokens that are really emitted.
    """
    params = req.sampling_params
    if params.ignore_eos:
        return False
    return token_id in _stop_ids(req)


def _stop_ids(req: Any) -> frozenset[int]:
    state = req.parse_state
    if state.stop_ids is None:
        ids = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
        if req.tokenizer is not None:
            ids.add(req.tokenizer.eos_token_id)
            ids.update(req.tokenizer.additional_stop_token_ids or ())
        state.stop_ids = frozenset(ids - {None})
    return state.stop_ids
