"""Which KV slots drafts and verification use, in plain PyTorch on a CPU (ledger: draft_slots_cpu).

``req_to_token`` is int32 [max_requests, row width]: request r's token at column c is in KV slot
``req_to_token[r, c]``. Everything is written in place, as SGLang's kernels do.
"""

from __future__ import annotations

import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_parse.patches.base import Hook, hook_patch, on_cpu_only

_LOCS = "sglang.kernels.ops.speculative.cache_locs"


def assign_extend_cache_locs(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: torch.device | str,
) -> torch.Tensor:
    """The slots of columns [start, end): int64 [batch_size * draft_token_num], packed in front.

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
    """Write the slots of the ``topk * num_cols`` columns from ``seq_lens`` on.

    Args:
        seq_lens: int64 [bs]; out_cache_loc: int64 [bs * topk * num_cols], written.
        positions, mrope: SGLang asks for them on a GPU only.

    Source: ``sglang.kernels.ops.speculative.cache_locs.assign_draft_cache_locs_contiguous_func``.
    """
    if positions is not None or mrope is not None:
        raise NotImplementedError("positions are not written here on a CPU")
    columns = seq_lens[:, None] + torch.arange(topk * num_cols, device=seq_lens.device)
    out_cache_loc.copy_(req_to_token[req_pool_indices[:, None], columns].flatten())


def fill_front_out_cache_loc(
    num_front: torch.Tensor, out_cache_loc: torch.Tensor, front_out_cache_loc: torch.Tensor
) -> None:
    """Pack the first ``num_front[i]`` slots of request i's share of ``out_cache_loc``.

    Args:
        num_front: int [bs]; out_cache_loc: [bs * width]; front_out_cache_loc: written in front.

    Source: ``sglang.kernels.ops.speculative.cache_locs.fill_front_out_cache_loc_func``.
    """
    window = out_cache_loc.view(num_front.numel(), -1)
    is_front = torch.arange(window.shape[1], device=window.device) < num_front[:, None]
    packed = window[is_front]
    front_out_cache_loc[: len(packed)] = packed


def _cells(
    requests: torch.Tensor, start: torch.Tensor, end: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and columns of the cells [start, end) of each request's row, concatenated."""
    lengths = (end - start).long()
    # A cell's place in the packed whole, less where its request begins there, is its offset.
    begins = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    offsets = torch.arange(len(begins), device=lengths.device) - begins
    return requests.repeat_interleave(lengths), start.repeat_interleave(lengths) + offsets


PATCH = hook_patch(
    "draft_slots_cpu",
    {
        f"{_LOCS}.assign_extend_cache_locs_func": Hook(assign_extend_cache_locs, HookType.REPLACE),
        f"{_LOCS}.assign_draft_cache_locs_contiguous_func": Hook(
            assign_draft_cache_locs_contiguous, HookType.REPLACE
        ),
        f"{_LOCS}.fill_front_out_cache_loc_func": Hook(fill_front_out_cache_loc, HookType.REPLACE),
    },
    why="stock EAGLE-3 and STANDALONE look up the KV slots of drafts with Triton kernels; a "
    "CPU has no Triton.",
    how="the same gathers in plain PyTorch. Only on machines without an accelerator.",
    removed_when="SGLang has a CPU path for them that needs no compiled CPU kernels.",
    is_needed=on_cpu_only,
)
