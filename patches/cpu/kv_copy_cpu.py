"""KV slot copies in plain PyTorch on a CPU (ledger: kv_copy_cpu)."""

from __future__ import annotations

import ctypes

import torch

from sglang_parse.patches.base import Patch, replace


def copy_all_layer_kv_cache(
    data_ptrs: torch.Tensor,
    strides: torch.Tensor,
    tgt_loc: torch.Tensor,
    src_loc: torch.Tensor,
    num_locs: int,
    num_locs_upper: int,  # noqa: ARG001 - a launch parameter of the Triton kernel
    kv_copy_config: dict,  # noqa: ARG001 - likewise
) -> None:
    """Copies ``num_locs`` KV rows in every K and V buffer; all are read before any is written.

    Args:
        data_ptrs: uint64 [num_buffers] addresses of contiguous buffers.
        strides: [num_buffers] bytes per slot.
        tgt_loc, src_loc: int64 slots; the first ``num_locs`` count.

    Source: ``sglang.kernels.ops.kvcache.cache_move.copy_all_layer_kv_cache_func``.
    """
    targets = tgt_loc[:num_locs].tolist()
    sources = src_loc[:num_locs].tolist()
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + slot * stride, stride) for slot in sources]
        for slot, row in zip(targets, rows, strict=True):
            ctypes.memmove(base + slot * stride, row, stride)


PATCH = Patch(
    "kv_copy_cpu",
    {
        "sglang.kernels.ops.kvcache.cache_move.copy_all_layer_kv_cache_func": replace(
            copy_all_layer_kv_cache
        ),
    },
    why="SGLang moves KV slots with a Triton kernel, and the KV pool's constructor warms it "
    "up; a CPU has no Triton.",
    how="the same copy in plain PyTorch and memory moves. Only on machines without an accelerator.",
    removed_when="SGLang has a CPU path for it.",
)
