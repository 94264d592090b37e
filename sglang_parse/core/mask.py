"""Attention masks of a verify pass.

All rows attend to the whole context. A draft row attends causally to the draft. A question row
attends to its question's visible draft rows and causally to its own question. Rows and columns are
those of ``layout.RequestLayout``.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from sglang_parse.core.layout import RequestLayout, VerifyLayout

_DRAFT = -1


def may_attend(layout: RequestLayout, row: int, column: int) -> bool:
    """Returns whether ``row`` in [0, num_rows) attends to ``column`` in [0, kv_len)."""
    if column < layout.prefix_len:
        return True
    key = column - layout.prefix_len
    owner, key_owner = _owner(layout, row), _owner(layout, key)
    causal_draft = owner == _DRAFT and key_owner == _DRAFT and key <= row
    visible_draft = owner != _DRAFT and key_owner == _DRAFT and key < layout.visible_lens[owner]
    same_question = owner != _DRAFT and key_owner == owner and key <= row
    return causal_draft or visible_draft or same_question


def _owner(layout: RequestLayout, row: int) -> int:
    """Returns the question of a row, or ``_DRAFT``."""
    owner = _DRAFT
    for question, start in enumerate(layout.question_starts):
        if row >= start:
            owner = question
    return owner


def qlen_only_mask(layout: RequestLayout, device: torch.device | str = "cpu") -> torch.Tensor:
    """Returns ``may_attend`` among the new rows: bool [num_rows, num_rows].

    Its cost does not depend on the context length.
    """
    if not layout.num_questions:
        return torch.ones(2 * (layout.num_rows,), dtype=torch.bool, device=device).tril()
    # No device sync: the copy is asynchronous, and repeat_interleave knows its output size.
    numbers = [
        [layout.num_draft_rows, *part] for part in (layout.question_lens, layout.visible_lens)
    ]
    lengths, draft_seen = torch.tensor(numbers).to(device, non_blocking=True)
    ids = torch.arange(-1, layout.num_questions, device=device)
    place = torch.repeat_interleave(lengths, output_size=layout.num_rows)
    owner, sees_draft = ids[place], draft_seen[place]
    row = torch.arange(layout.num_rows, device=device)
    causal = row[None, :] <= row[:, None]
    same_owner = owner[None, :] == owner[:, None]
    visible_draft = (owner[None, :] == _DRAFT) & (row[None, :] < sees_draft[:, None])
    return causal & (same_owner | visible_draft)


def flat_mask(layout: VerifyLayout, device: torch.device | str = "cpu") -> torch.Tensor:
    """Returns the mask of a batch as FlashInfer expects it: bool [layout.mask_size].

    Row-major over [num_rows, kv_len], requests concatenated (flashinfer
    ``BatchPrefillWithPagedKVCacheWrapper.plan(custom_mask=...)``). With 32,768 context tokens and
    1,217 rows it has 39 MiB, so it is written once and only the new rows' columns are changed.
    """
    flat = torch.ones(layout.mask_size, dtype=torch.bool, device=device)
    masks: dict[tuple, torch.Tensor] = {}  # all blocks of a draft forward have the same
    for part, request in zip(split_flat_mask(flat, layout), layout.requests, strict=True):
        if request.num_rows > 1:
            rows = request.num_draft_rows, request.visible_lens, request.question_lens
            if rows not in masks:
                masks[rows] = qlen_only_mask(request, device)
            part[:, request.prefix_len :] = masks[rows]
    return flat


def flat_mask_at(
    layout: VerifyLayout, starts: torch.Tensor, qlen_mask: torch.Tensor
) -> torch.Tensor:
    """Returns ``flat_mask`` for context lengths that only the device knows.

    Args:
        layout: requests with the same rows, with an upper bound of each context length.
        starts: int64 [num_requests] context lengths.
        qlen_mask: the ``qlen_only_mask`` of each request.

    Returns:
        bool [layout.mask_size] that starts with ``flat_mask(layout.at(starts))``.
    """
    flat = torch.ones(layout.mask_size, dtype=torch.bool, device=qlen_mask.device)
    entries = entries_of_rows(starts, len(qlen_mask))
    return flat.index_put_((entries,), qlen_mask.expand_as(entries))


def entries_of_rows(starts: torch.Tensor, num_rows: int) -> torch.Tensor:
    """int64 [num_requests, num_rows, num_rows]: where a ``flat_mask`` has what new rows see of one
    another, ``num_rows`` of each request behind its context of ``starts``."""
    row = torch.arange(num_rows, device=starts.device)
    kv_lens = starts + num_rows
    first = (num_rows * kv_lens).cumsum(0) - num_rows * kv_lens + starts
    return first[:, None, None] + row[:, None] * kv_lens[:, None, None] + row


def split_flat_mask(flat: torch.Tensor, layout: VerifyLayout) -> list[torch.Tensor]:
    """Splits a ``flat_mask`` into one bool [num_rows, kv_len] view per request.

    Raises:
        ValueError: the mask has another size than the layout.
    """
    if flat.numel() != layout.mask_size:
        raise ValueError(f"mask has {flat.numel()} entries, the layout needs {layout.mask_size}")
    sizes = [end - start for start, end in pairwise(layout.mask_indptr)]
    return [
        part.view(r.num_rows, r.kv_len)
        for part, r in zip(flat.split(sizes), layout.requests, strict=True)
    ]
