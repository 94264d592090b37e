"""KV slots of the layout ``alias``: pseudo-sequences that share their request's slots."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from sglang_parse.core.layout import PseudoSequence


class PagedRows(NamedTuple):
    """Pseudo-sequences in the form of paged attention; int32 on the device.

    qo_indptr: [n + 1] CSR offsets of their rows; kv_indptr: [n + 1] of their slots;
    kv_slots: [kv_indptr[-1]] slot of every column, in order; longest: rows of the longest one.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_slots: torch.Tensor
    longest: int


def paged_rows(
    sequences: Sequence[PseudoSequence],
    slots: torch.Tensor,
    *,
    with_own: bool,
    starts: torch.Tensor | None = None,
    window: int | None = None,
) -> PagedRows:
    """Builds the inputs of a kernel that reads KV through slot numbers.

    Args:
        sequences: the pass's pseudo-sequences in row order.
        slots: [num_requests, width] the requests' rows of ``req_to_token``.
        with_own: whether a sequence's own rows count as columns (kernels that read all KV from
            the pool), or only its context (kernels that take the new rows' KV separately).
        starts: see ``ParseVerifyInput.starts``. Slots past ``kv_indptr[-1]`` are not read then.
        window: how many of a sequence's columns, the last ones; without ``starts``. None for all.
    """
    device = slots.device
    kv_lens = [s.kv_len if with_own else s.context_len for s in sequences]
    skipped = [0 if window is None else max(0, length - window) for length in kv_lens]
    kv_lens = [length - skip for length, skip in zip(kv_lens, skipped, strict=True)]
    kv_indptr = kv_offsets(kv_lens, sequences, device, starts)
    columns = torch.arange(sum(kv_lens), dtype=torch.int32, device=device)
    owner = torch.searchsorted(kv_indptr[1:], columns, right=True).clamp_(max=len(sequences) - 1)
    place = columns - kv_indptr[owner]
    if window is not None:
        place = place + _sent(skipped, device)[owner]
    return PagedRows(
        qo_indptr=indptr([s.num_rows for s in sequences], device),
        kv_indptr=kv_indptr,
        kv_slots=_slots_of(sequences, slots, owner, place, starts),
        longest=max(s.num_rows for s in sequences),
    )


def page_table(
    sequences: Sequence[PseudoSequence], slots: torch.Tensor, starts: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns int32 [n, longest kv_len], the slot of every column, of the same arguments as
    ``paged_rows``; padding is not read."""
    place = torch.arange(max(s.kv_len for s in sequences), device=slots.device)
    owner = torch.arange(len(sequences), device=slots.device)[:, None]
    return _slots_of(sequences, slots, owner, place[None, :], starts)


def indptr(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Returns int32 [n + 1], the CSR offsets of these lengths."""
    return _sent([*accumulate(lengths, initial=0)], device, torch.int32)


def kv_offsets(
    lengths: Sequence[int],
    sequences: Sequence[PseudoSequence],
    device: torch.device,
    starts: torch.Tensor | None,
) -> torch.Tensor:
    """``indptr`` of lengths whose context length, with ``starts``, only the device knows."""
    if starts is None:
        return indptr(lengths, device)
    requests = [s.request for s in sequences]
    beyond = [length - s.prefix_len for length, s in zip(lengths, sequences, strict=True)]
    owner, after = _sent([*requests, *beyond], starts.device).view(2, -1).unbind()
    return torch.nn.functional.pad((starts[owner] + after).cumsum(0), (1, 0)).to(torch.int32)


def _slots_of(
    sequences: Sequence[PseudoSequence],
    slots: torch.Tensor,
    owner: torch.Tensor,
    place: torch.Tensor,
    starts: torch.Tensor | None,
) -> torch.Tensor:
    """Returns the int32 slot of the ``place``-th column of the sequences ``owner``."""
    numbers = [
        number
        for s in sequences
        for number in (s.request, s.context_len, s.start_column - s.context_len, s.prefix_len)
    ]
    request, context, jump, prefix = _sent(numbers, owner.device).view(-1, 4)[owner].unbind(-1)
    if starts is not None:
        context = context - prefix + starts[request]
    column = torch.where(place < context, place, place + jump).clamp(max=slots.shape[1] - 1)
    return slots[request, column].to(torch.int32)


def _sent(
    values: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """``device.on_device`` without SGLang."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
