"""Reads and writes of ``req_to_token`` in plain PyTorch on a CPU (ledger: req_to_token_cpu).

``req_to_token`` is int32 [max requests, row width]: request r's token at column c is in KV slot
``req_to_token[r, c]``. Outputs are written in place, as SGLang's kernels do.
"""

from __future__ import annotations

import torch

from sglang_parse.patches.base import Patch, replace

_LOCS = "sglang.kernels.ops.speculative.cache_locs"


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Writes new slots into columns [start_offset[i], end_offset[i]) of each request's row.

    Args:
        req_pool_indices: int64 [batch_size] rows of ``req_to_token``.
        start_offset, end_offset: int [batch_size] columns.
        out_cache_loc: int64 [sum of the columns' counts], the slots packed by row.

    Source: ``sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func``.
    """
    starts, ends = start_offset[:batch_size], end_offset[:batch_size]
    rows, columns = _cells(req_pool_indices[:batch_size], starts, ends)
    req_to_token[rows, columns] = out_cache_loc[: len(rows)].to(req_to_token.dtype)


def assign_extend_cache_locs(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: torch.device | str,
) -> torch.Tensor:
    """Returns the slots of columns [start, end), packed: int64 [batch_size * draft_token_num].

    Args:
        req_pool_indices: int64 [bs] rows; start_offset, end_offset: int [bs] columns.

    Source: ``sglang.kernels.ops.speculative.cache_locs.assign_extend_cache_locs_func``.
    """
    rows, columns = _cells(req_pool_indices, start_offset, end_offset)
    slots = torch.zeros(batch_size * draft_token_num, dtype=torch.int64, device=device)
    slots[: len(rows)] = req_to_token[rows, columns].long()
    return slots


def assign_draft_cache_locs_contiguous(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    topk: int,
    num_cols: int,
    positions: torch.Tensor | None = None,
    mrope: torch.Tensor | None = None,
) -> None:
    """Writes the slots of the ``topk * num_cols`` columns from ``seq_lens`` on.

    Args:
        seq_lens: int64 [bs]; out_cache_loc: int64 [bs * topk * num_cols], written.
        positions, mrope: SGLang passes them on a GPU only.

    Source: ``sglang.kernels.ops.speculative.cache_locs.assign_draft_cache_locs_contiguous_func``.
    """
    if positions is not None or mrope is not None:
        raise NotImplementedError("positions are not written here on a CPU")
    columns = seq_lens[:, None] + torch.arange(topk * num_cols, device=seq_lens.device)
    out_cache_loc.copy_(req_to_token[req_pool_indices[:, None], columns].flatten())


def fill_front_out_cache_loc(
    num_front: torch.Tensor, out_cache_loc: torch.Tensor, front_out_cache_loc: torch.Tensor
) -> None:
    """Packs the first ``num_front[i]`` slots of each request's part of ``out_cache_loc``.

    Args:
        num_front: int [bs]; out_cache_loc: [bs * width]; front_out_cache_loc: written, packed.

    Source: ``sglang.kernels.ops.speculative.cache_locs.fill_front_out_cache_loc_func``.
    """
    window = out_cache_loc.view(num_front.numel(), -1)
    is_front = torch.arange(window.shape[1], device=window.device) < num_front[:, None]
    packed = window[is_front]
    front_out_cache_loc[: len(packed)] = packed


def _cells(
    requests: torch.Tensor, start: torch.Tensor, end: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows and columns of all requests' cells [start, end), concatenated."""
    lengths = (end - start).long()
    begins = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    offsets = torch.arange(len(begins), device=lengths.device) - begins
    return requests.repeat_interleave(lengths), start.repeat_interleave(lengths) + offsets


PATCH = Patch(
    "req_to_token_cpu",
    {
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func": replace(
            assign_req_to_token_pool
        ),
        f"{_LOCS}.assign_extend_cache_locs_func": replace(assign_extend_cache_locs),
        f"{_LOCS}.assign_draft_cache_locs_contiguous_func": replace(
            assign_draft_cache_locs_contiguous
        ),
        f"{_LOCS}.fill_front_out_cache_loc_func": replace(fill_front_out_cache_loc),
    },
    why="every speculative algorithm writes new KV slots into `req_to_token` with a Triton kernel, "
    "and stock EAGLE-3 and STANDALONE read those of drafts with others; a CPU has no Triton.",
    how="the same reads and writes in plain PyTorch. Only on machines without an accelerator.",
    removed_when="SGLang has a CPU path for them that needs no compiled CPU kernels.",
)
