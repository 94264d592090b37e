"""KV slots and request bookkeeping: who owns which part of a request's row.

    [0, kv_committed_len)                  final KV of prompt and output; the radix cache takes it
    [kv_committed_len, kv_allocated_len)   slots for what the request does next, see phases.tail_len
    [kv_allocated_len, row width)          nothing

The last output token (the anchor) has no KV yet: its slot is the first of the middle part.
SGLang advances ``kv_committed_len`` itself when it processes a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from sglang.srt.mem_cache.allocation import alloc_token_slots

from sglang_parse.config import ParseConfig
from sglang_parse.phases import RequestState, tail_len


@lru_cache(maxsize=1)
def server_config() -> ParseConfig:
    """This process's settings; fixed once a server runs."""
    return ParseConfig.from_env()


def draft_budget(req: Any) -> int:
    """Draft tokens the request's current round may hold, at least 1."""
    remaining = req.sampling_params.max_new_tokens - len(req.output_ids)
    return max(1, min(server_config().draft_tokens, remaining))


def slots_needed(req: Any) -> int:
    """Slots behind the committed ones for the next iteration.

    Before a request's first prefill result is processed it has no state; one slot serves it.
    """
    state: RequestState | None = getattr(req, "parse_state", None)
    if state is None:
        return 1
    return tail_len(state, server_config().burst_tokens, draft_budget(req))


def missing_slots(req: Any) -> int:
    return max(0, req.kv.kv_committed_len + slots_needed(req) - req.kv.kv_allocated_len)


def slots_required(batch: Any, requests: Sequence[Any]) -> int:  # noqa: ARG001 - SGLang's shape
    """Slots the next iteration allocates for ``requests``: SGLang's capacity check.

    Twin of ``prepare_for_decode``. Source: ``_new_tokens_required_next_decode_spec_v2``.
    """
    return sum(missing_slots(req) for req in requests)


def prepare_for_decode(batch: Any) -> None:
    """Allocate what every running request needs for its next step, and nothing more.

    Source: ``sglang.srt.speculative.eagle_utils.eagle_prepare_for_decode``.
    """
    if batch.sampling_info.penalizer_orchestrator.is_required:
        batch.cumulate_penalty_output_tokens()
    counts = [missing_slots(req) for req in batch.reqs]
    if total := sum(counts):
        slots = alloc_token_slots(batch.tree_cache, total)
        _write_slots(batch, counts, slots)
    for req in batch.reqs:
        req.decode_batch_idx += 1


def _write_slots(batch: Any, counts: Sequence[int], slots: torch.Tensor) -> None:
    table = batch.req_to_token_pool.req_to_token
    taken = 0
    for req, count in zip(batch.reqs, counts, strict=True):
        if count:
            start = req.kv.kv_allocated_len
            row = slots[taken : taken + count].to(table.dtype)
            table[req.kv.req_pool_idx, start : start + count] = row
            req.kv.kv_allocated_len = start + count
            taken += count


def release_tail(batch: Any, req: Any, keep_len: int) -> None:
    """Give back the slots from ``keep_len`` on: rejected draft and question KV.

    Nothing can read question KV after its pass, because nothing owns it.
    """
    allocated = req.kv.kv_allocated_len
    if keep_len >= allocated:
        return
    table = batch.req_to_token_pool.req_to_token
    slots = table[req.kv.req_pool_idx, keep_len:allocated].to(torch.int64)
    batch.tree_cache.token_to_kv_pool_allocator.free(slots)
    req.kv.kv_allocated_len = keep_len


def sequence_slice(req: Any, start: int, end: int, draft: Sequence[int] = ()) -> list[int]:
    """Token ids [start, end) of prompt + output + draft."""
    prompt, output = req.origin_input_ids, req.output_ids
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
