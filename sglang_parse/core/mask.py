"""Who may attend to whom in one verification pass.

A query row sees: the whole context, draft rows up to itself (if it is a draft row) or up to its
cut (if it belongs to a question), and the earlier rows of its own question. Nothing else: never
later draft, never another question. Valid for the columns ``layout.RequestLayout`` defines.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from sglang_parse.core.layout import RequestLayout, VerifyLayout

_DRAFT = -1


def may_attend(layout: RequestLayout, row: int, column: int) -> bool:
    """The rule for one query ``row`` in [0, num_rows) and one ``column`` in [0, kv_len)."""
    if column < layout.prefix_len:
        return True
    key = column - layout.prefix_len
    owner, key_owner = _owner(layout, row), _owner(layout, key)
    causal_draft = owner == _DRAFT and key_owner == _DRAFT and key <= row
    prefix_of_question = (
        owner != _DRAFT and key_owner == _DRAFT and key < layout.visible_lens[owner]
    )
    same_question = owner != _DRAFT and key_owner == owner and key <= row
    return causal_draft or prefix_of_question or same_question


def _owner(layout: RequestLayout, row: int) -> int:
    """The question a row belongs to, or ``_DRAFT``."""
    owner = _DRAFT
    for question, start in enumerate(layout.question_starts):
        if row >= start:
            owner = question
    return owner


def qlen_only_mask(layout: RequestLayout, device: torch.device | str = "cpu") -> torch.Tensor:
    """``may_attend`` among the new rows only: bool [num_rows, num_rows].

    Tensor operations over row owners; the cost does not depend on the context's length.
    """
    if not layout.num_questions:  # a chain: a head's proposals, a draft in token mode
        return torch.ones(2 * (layout.num_rows,), dtype=torch.bool, device=device).tril()
    # Neither the copy nor the repetition, whose size is known here, waits for the device.
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
    draft_before_cut = (owner[None, :] == _DRAFT) & (row[None, :] < sees_draft[:, None])
    return causal & (same_owner | draft_before_cut)


def dense_mask(layout: RequestLayout, device: torch.device | str = "cpu") -> torch.Tensor:
    """The full mask of one request: bool [num_rows, kv_len]."""
    context = torch.ones(layout.num_rows, layout.prefix_len, dtype=torch.bool, device=device)
    return torch.cat((context, qlen_only_mask(layout, device)), dim=1)


def flat_mask(layout: VerifyLayout, device: torch.device | str = "cpu") -> torch.Tensor:
    """The form FlashInfer takes: bool [layout.mask_size].

    Row-major, query first, over the full KV length; requests concatenated
    (flashinfer ``BatchPrefillWithPagedKVCacheWrapper.plan(custom_mask=...)``). At 32,768 tokens of
    context and 1,217 rows it has 39 MiB, written once: only the new rows' columns differ.
    """
    flat = torch.ones(layout.mask_size, dtype=torch.bool, device=device)
    for part, request in zip(split_flat_mask(flat, layout), layout.requests, strict=True):
        if request.num_rows > 1:  # one row sees itself
            part[:, request.prefix_len :] = qlen_only_mask(request, device)
    return flat


def flat_mask_at(layout: VerifyLayout, starts: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """``flat_mask`` behind contexts of which only the device knows the lengths.

    Args:
        layout: requests whose rows are alike, each behind the longest context it can have.
        starts: int64 [num_requests] the lengths.
        tail: the ``qlen_only_mask`` of each.

    Returns:
        bool [layout.mask_size] which begins with ``flat_mask(layout.at(starts))``.
    """
    num_rows = len(tail)
    flat = torch.ones(layout.mask_size, dtype=torch.bool, device=tail.device)
    row = torch.arange(num_rows, device=tail.device)
    kv_lens = starts + num_rows
    first = (num_rows * kv_lens).cumsum(0) - num_rows * kv_lens + starts
    columns = first[:, None, None] + row[:, None] * kv_lens[:, None, None] + row
    return flat.index_put_((columns,), tail.expand_as(columns))


def split_flat_mask(flat: torch.Tensor, layout: VerifyLayout) -> list[torch.Tensor]:
    """Undo ``flat_mask``: one bool [num_rows, kv_len] view per request.

    Raises:
        ValueError: the mask was made for other lengths.
    """
    if flat.numel() != layout.mask_size:
        raise ValueError(f"mask has {flat.numel()} entries, the layout needs {layout.mask_size}")
    sizes = [end - start for start, end in pairwise(layout.mask_indptr)]
    return [
        part.view(r.num_rows, r.kv_len)
        for part, r in zip(flat.split(sizes), layout.requests, strict=True)
    ]
