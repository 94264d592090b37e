"""The kernels of ``split_kv``: one attends to a part of the KV, one combines the parts."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["splits"])
def attend_part(
    q, q_row, q_head, k, k_row, k_head, v, v_row, v_head,
    k_cache, k_slot, k_cache_head, v_cache, v_slot, v_cache_head,
    qo_indptr, kv_indptr, kv_indices, mask, tiles, partial, lse, scale, k_scale, v_scale, width,
    splits, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, IS_FP8: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """One part for a block of a KV head's rows x query heads. The first is the new rows; the last
    ones have nothing to do where the context is short: ``splits`` parts for each LONG tokens."""
    kv_head, part, num_parts = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    if tiles is None:
        num_blocks = tl.cdiv(width * GROUP, ROWS)
        request, block = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    else:
        request = tl.load(tiles + tl.program_id(0)).to(tl.int32)
        block = tl.load(tiles + tl.num_programs(0) + tl.program_id(0)).to(tl.int32)
    if request < 0:
        return
    first_row = tl.load(qo_indptr + request).to(tl.int32)
    num_rows = tl.load(qo_indptr + request + 1).to(tl.int32) - first_row
    packed = block * ROWS + tl.arange(0, ROWS)
    row, head = packed // GROUP, kv_head * GROUP + packed % GROUP
    is_row = row < num_rows
    place = ((first_row + row) * (tl.num_programs(1) * GROUP) + head) * num_parts + part

    start = tl.load(kv_indptr + request)
    context = tl.load(kv_indptr + request + 1) - start
    is_context = part > 0
    splits = tl.minimum(splits * (1 + context // LONG), num_parts - 1)
    share = tl.cdiv(tl.cdiv(context, TILE), splits) * TILE
    first = tl.where(is_context, (part - 1) * share, 0)
    # No row sees those behind it, whatever the mask.
    last_row = tl.minimum((block * ROWS + ROWS - 1) // GROUP, num_rows - 1)
    last = tl.where(is_context, tl.minimum(first + share, context), last_row + 1)
    if first >= last:
        tl.store(lse + place, tl.full([ROWS], float("-inf"), tl.float32), mask=is_row)
        return

    d = tl.arange(0, BLOCK_D)
    is_d = d < DIM
    queries = q + (first_row + row)[:, None] * q_row + head[:, None] * q_head + d[None, :]
    q_tile = tl.load(queries, mask=is_row[:, None] & is_d[None, :], other=0.0)
    k, v = k + kv_head * k_head, v + kv_head * v_head
    k_cache, v_cache = k_cache + kv_head * k_cache_head, v_cache + kv_head * v_cache_head
    slots = kv_indices + start
    if IS_FP8:
        if is_context:
            acc, total, peak = _walk(
                q_tile, k_cache, k_slot, v_cache, v_slot, slots, None, first, last, True,
                0, row, is_row, scale * k_scale, width, DIM, BLOCK_D, ROWS, TILE,
            )  # fmt: skip
            acc *= v_scale
        else:
            acc, total, peak = _walk(
                q_tile, k, k_row, v, v_row, slots, mask, first, last, False,
                first_row, row, is_row, scale, width, DIM, BLOCK_D, ROWS, TILE,
            )  # fmt: skip
    else:  # one loop for both: two would take twice the shared memory
        acc, total, peak = _walk(
            q_tile, tl.where(is_context, k_cache, k), tl.where(is_context, k_slot, k_row),
            tl.where(is_context, v_cache, v), tl.where(is_context, v_slot, v_row),
            slots, mask, first, last, is_context,
            first_row, row, is_row, scale, width, DIM, BLOCK_D, ROWS, TILE,
        )  # fmt: skip
    tl.store(lse + place, peak + tl.log2(total), mask=is_row)
    partial += place[:, None] * DIM + d[None, :]
    tl.store(partial, acc / total[:, None], mask=is_row[:, None] & is_d[None, :])


@triton.jit
def _walk(
    q_tile, k, k_row, v, v_row, slots, mask, first, last, is_context, first_row, row, is_row, scale,
    width, DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Weighted values, weights and the highest score of the KV [first, last): of the context by
    ``slots``, or of the new rows from ``first_row`` on."""
    d = tl.arange(0, BLOCK_D)
    is_d = d < DIM
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], -1e20, tl.float32)  # finite: a row may see nothing of a tile
    for tile in range(first, last, TILE):
        token = tile + tl.arange(0, TILE)
        is_token = token < last
        slot = tl.load(slots + token, mask=is_token & is_context, other=0)
        place = tl.where(is_context, slot, first_row + token)
        k_mask, v_mask = is_token[None, :] & is_d[:, None], is_token[:, None] & is_d[None, :]
        k_tile = tl.load(k + place[None, :] * k_row + d[:, None], mask=k_mask, other=0.0)
        v_tile = tl.load(v + place[:, None] * v_row + d[None, :], mask=v_mask, other=0.0)
        k_tile, v_tile = k_tile.to(q_tile.dtype), v_tile.to(q_tile.dtype)  # of 8-bit KV
        seen = is_token[None, :] & (is_context | (token[None, :] <= row[:, None]))
        if mask is not None:
            entry = (row * width)[:, None] + token[None, :]
            is_new = seen & is_row[:, None] & (not is_context)
            seen &= is_context | (tl.load(mask + entry, mask=is_new, other=0) != 0)
        # A running softmax to base 2: ``scale`` includes log2(e).
        scores = tl.where(seen, tl.dot(q_tile, k_tile) * scale, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights, decay = tl.exp2(scores - new_peak[:, None]), tl.exp2(peak - new_peak)
        acc = acc * decay[:, None] + tl.dot(weights.to(v_tile.dtype), v_tile)
        total, peak = total * decay + tl.sum(weights, 1), new_peak
    return acc, total, peak


@triton.jit
def combine(
    partial, lse, out, out_row, out_head, num_items, num_heads,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr, SHORT: tl.constexpr,
    ITEMS: tl.constexpr,
):  # fmt: skip
    """The parts of ITEMS rows' query heads, weighted by what each adds to the softmax; SHORT are
    those of the new rows and of a short context, and are read at once."""
    item, d = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS), tl.arange(0, BLOCK_D)
    is_item, is_d = item < num_items, d < DIM
    acc = tl.zeros([ITEMS, BLOCK_D], tl.float32)
    total = tl.zeros([ITEMS], tl.float32)
    peak = tl.full([ITEMS], float("-inf"), tl.float32)
    acc, total, peak = _add(
        acc, total, peak, partial, lse, item, is_item, d, is_d, 0, DIM, PARTS, SHORT
    )
    if SHORT < PARTS:
        following = tl.load(lse + item * PARTS + SHORT, mask=is_item, other=float("-inf"))
        if tl.max(following, 0) > float("-inf"):  # parts without tokens are the last ones
            for first in range(SHORT, PARTS, SHORT):
                acc, total, peak = _add(
                    acc, total, peak, partial, lse, item, is_item, d, is_d, first, DIM, PARTS, SHORT
                )
    out += (item // num_heads)[:, None] * out_row + (item % num_heads)[:, None] * out_head
    tl.store(out + d[None, :], acc / total[:, None], mask=is_item[:, None] & is_d[None, :])


@triton.jit
def _add(
    acc, total, peak, partial, lse, item, is_item, d, is_d, first,
    DIM: tl.constexpr, PARTS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """A running softmax with COUNT parts more, from ``first`` on."""
    before = peak
    for part in tl.static_range(COUNT):
        place, is_part = item * PARTS + first + part, is_item & (first + part < PARTS)
        peak = tl.maximum(peak, tl.load(lse + place, mask=is_part, other=float("-inf")))
    decay = tl.exp2(before - peak)
    acc, total = acc * decay[:, None], total * decay
    for part in tl.static_range(COUNT):
        place, is_part = item * PARTS + first + part, is_item & (first + part < PARTS)
        weight = tl.exp2(tl.load(lse + place, mask=is_part, other=float("-inf")) - peak)
        # A part without tokens has written nothing but its weight, 0.
        is_read = (weight > 0)[:, None] & is_d[None, :]
        values = tl.load(partial + place[:, None] * DIM + d[None, :], mask=is_read, other=0.0)
        acc, total = acc + weight[:, None] * values, total + weight
    return acc, total, peak
