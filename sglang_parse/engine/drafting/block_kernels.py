"""What a block does around the model's forward, as two kernels: some 80 small ones take 0.3 of the
1.9 ms of a block on an H200 (counted, and at 3.5 us each).

The same as ``core.block_accept`` in PyTorch, of which a CPU runs it.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sglang_parse.core.block import NO_TOKEN, BlockKind, Masks
from sglang_parse.core.block_accept import GOLDEN, UNIT
from sglang_parse.core.simulation import block_tokens

ARE_USED = torch.cuda.is_available() or triton.knobs.runtime.interpret


def load_rows(
    kind: BlockKind, given: torch.Tensor, size: int, inputs: Any, rows: Any, table: torch.Tensor
) -> None:
    """Writes the rows of ``size`` requests into a graph's inputs.

    Args:
        given: int64 [requests, columns] pool, limit, start, last token, numbers of candidates and
            of known ones, candidates.
        inputs: ``WideInputs``; ``rows``: ``BlockRows``.
        table: ``req_to_token``.
    """
    _load[(size,)](
        given,
        rows.offsets,
        table,
        table.stride(0),
        inputs.ids,
        inputs.positions,
        inputs.slots,
        inputs.pools,
        inputs.starts,
        rows.mask_id,
        rows.last_position,
        inputs.width,
        given.shape[1],
        kind.size,
        triton.next_power_of_2(inputs.width),
    )


def accept_rows(
    kind: BlockKind,
    given: torch.Tensor,
    done: torch.Tensor,
    choices: torch.Tensor,
    surprisals: torch.Tensor,
    proposed: torch.Tensor | None,
    mask_id: int,
) -> None:
    """As ``accept_blocks``: writes ``done``, int64 [requests, columns] the state after a block, and
    its record."""
    simulated = block_tokens()
    whole = 0 if simulated is None else int(simulated)
    _accept[(len(choices),)](
        given,
        choices,
        surprisals,
        proposed,
        done,
        mask_id,
        choices.shape[1],
        given.shape[1],
        done.shape[1],
        kind.size,
        kind.masks is Masks.LAST,
        whole,
        0 if simulated is None else int((simulated - whole) * UNIT),
        UNIT,
        GOLDEN,
        NO_TOKEN,
        triton.next_power_of_2(max(2, kind.size)),
        triton.next_power_of_2(choices.shape[1]),
    )


@triton.jit
def _load(
    given, offsets, table, table_row, ids, positions, slots, pools, starts, mask_id, last_position,
    width, COLUMNS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    request, row = tl.program_id(0), tl.arange(0, ROWS)
    given += request * COLUMNS
    pool = tl.load(given)
    # No block goes past its slots into those of others.
    start = tl.minimum(tl.load(given + 2), tl.load(given + 1))
    is_row, is_candidate = row < width, (row > 0) & (row < SIZE)
    token = tl.load(given + 5 + row, mask=is_candidate, other=0)
    token = tl.where(is_candidate, token, tl.where(row == 0, tl.load(given + 3), mask_id))
    offset = tl.load(offsets + row, mask=is_row, other=0)
    slot = tl.load(table + pool * table_row + start + row, mask=is_row, other=0)
    at = request * width + row
    tl.store(ids + at, token, mask=is_row)
    tl.store(positions + at, tl.minimum(start + offset, last_position), mask=is_row)
    tl.store(slots + at, slot.to(tl.int64), mask=is_row)
    tl.store(pools + request, pool)
    tl.store(starts + request, start)


@triton.jit
def _accept(
    given, choices, surprisals, by_head, done, mask_id, width,
    COLUMNS: tl.constexpr, DONE: tl.constexpr, SIZE: tl.constexpr, IS_LAST: tl.constexpr,
    WHOLE: tl.constexpr, PART: tl.constexpr, UNIT: tl.constexpr, GOLDEN: tl.constexpr,
    NO_TOKEN: tl.constexpr, PLACES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    request, place, row = tl.program_id(0), tl.arange(0, PLACES), tl.arange(0, ROWS)
    given, choices = given + request * COLUMNS, choices + request * width
    done += request * DONE
    start = tl.minimum(tl.load(given + 2), tl.load(given + 1))
    last, count, known = tl.load(given + 3), tl.load(given + 4), tl.load(given + 5)
    is_mask = place < SIZE - 1
    candidate = tl.load(given + 6 + place, mask=is_mask, other=0)
    if WHOLE:
        drawn = (start * start * GOLDEN % UNIT < PART).to(tl.int64)
        matched = tl.minimum(known + (WHOLE - 1) + drawn, count)
    else:
        chosen = tl.load(choices + place, mask=is_mask, other=0)
        goes_on = ((chosen == candidate) & (place < count)) | (place < known)
        matched = tl.min(tl.where(goes_on & is_mask, SIZE - 1, place), 0).to(tl.int64)
        matched = tl.minimum(matched, SIZE - 1)
    tokens = tl.load(choices + row, mask=row < width, other=0)
    is_sound = tl.max((tokens == NO_TOKEN).to(tl.int64), 0) == 0
    if IS_LAST:
        first, proposes = matched + 1, matched == count
    else:
        first, proposes = SIZE + matched * (SIZE - 1), matched >= 0
    if by_head is None:
        proposal = tl.load(choices + first + place, mask=is_mask & proposes, other=0)
    else:
        proposal = tl.load(by_head + request * (SIZE - 1) + place, mask=is_mask, other=0)
    proposal = tl.where(proposes, proposal, mask_id)
    num_proposed = tl.where(proposes, SIZE - 1, 0).to(tl.int64)
    tl.store(done, start + tl.where(is_sound, matched + 1, 0))
    tl.store(done + 1, tl.where(is_sound, tl.load(choices + matched), last))
    tl.store(done + 2, tl.where(is_sound, num_proposed, count))
    tl.store(done + 3, tl.where(is_sound, 0, known))
    tl.store(done + 4 + place, tl.where(is_sound, proposal, candidate), mask=is_mask)
    record = done + 3 + SIZE
    tl.store(record, tl.where(is_sound, matched + 1 - known, 0))
    tl.store(record + 1, num_proposed)
    new = tl.load(choices + tl.minimum(known + place, width - 1), mask=place < SIZE, other=0)
    tl.store(record + 2 + place, new, mask=place < SIZE)
    surprisal = tl.load(surprisals + request * SIZE + tl.minimum(known + place, SIZE - 1))
    tl.store(record + 2 + SIZE + place, surprisal, mask=place < SIZE)
    tl.store(record + 2 + 2 * SIZE + place, proposal, mask=is_mask)
