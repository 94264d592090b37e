"""New KV slots into the requests' rows in plain PyTorch on a CPU (ledger: slot_table_cpu)."""

from __future__ import annotations

import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_parse.patches.base import Hook, hook_patch, on_cpu_only


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write row ``i``'s columns [start_offset[i], end_offset[i]); new slots come packed by row.

    Args:
        req_pool_indices: int64 [batch_size] rows of ``req_to_token``.
        req_to_token: int32 [max requests, row width], changed in place.
        start_offset, end_offset: integer [batch_size].
        out_cache_loc: int64 [sum of the columns' counts].
        batch_size: requests.

    Source: ``sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func``.
    """
    counts = (end_offset - start_offset)[:batch_size].long()
    rows = req_pool_indices[:batch_size].repeat_interleave(counts)
    before = counts.cumsum(0) - counts
    columns = torch.arange(len(rows)) + (start_offset[:batch_size] - before).repeat_interleave(
        counts
    )
    req_to_token[rows, columns] = out_cache_loc[: len(rows)].to(req_to_token.dtype)


PATCH = hook_patch(
    "slot_table_cpu",
    {
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func": Hook(
            assign_req_to_token_pool, HookType.REPLACE
        ),
    },
    why="every speculative algorithm enters new KV slots into its requests' rows with a "
    "Triton kernel; a CPU has no Triton.",
    how="the same scatter in plain PyTorch. Only on machines without an accelerator.",
    removed_when="SGLang has a CPU path for it that needs no compiled CPU kernels.",
    is_needed=on_cpu_only,
)
