"""Split-KV attention: a request's few rows over its context, by many programs at once.

SGLang's extend kernel walks a request's context in one program per query head, with most of the GPU
idle. Here each part of a context has programs of its own, each for all query heads of a KV head;
a second kernel combines the parts.

SGLang's split-KV kernels do not do: ``verify_splitkv`` knows no mask and keeps rows x rows x
head_dim products in registers; the one that combines parts for its decode attention
(``_fwd_kernel_stage2``) reads them one after another.

``ENV_VAR`` 0 leaves all to SGLang's kernel.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton

from sglang_parse.attention.split_kernels import attend_part, combine

ENV_VAR = "SGLANG_PARSE_SPLIT_KV"
MAX_BLOCK, TILE, WARPS, STAGES = 64, 64, 4, 2
"""Of a program: most rows x query heads, KV tokens at a time, warps, and tiles loaded ahead."""
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
PROGRAMS_PER_SM, MAX_SPLITS = 1, 16
"""A context has as many parts as make so many programs, but no more than so many. All of these were
the best of 23 settings on an H200: 3.6 times as fast as SGLang's kernel over 60 shapes."""
LONG, LONG_PROGRAMS_PER_SM, MAX_LONG_SPLITS = 8192, 2, 64
"""A context of so many tokens has twice as many parts, of twice as many three times, and so on, up
to these: an SM holds two programs at head_dim 128. Not measured."""
_COMBINED = 4
"""Outputs of query heads per program that combines parts: 16 of each are on their way at once."""
_PLAIN = dict.fromkeys(("sinks", "window_kv_offsets", "score_mod", "aux_tensors")) | {
    "logit_cap": 0.0,
    "sliding_window_size": -1,
    "xai_temperature_len": -1,
}
_NO_MATTER = {"page_size", "extend_seq_lens_cpu"}
"""Slots are tokens' whatever the page; no grid here depends on the requests' lengths."""
_LOG2_E = 1.4426950408889634


class _Call(NamedTuple):
    """The arguments of SGLang's ``extend_attention_fwd``, in its order; n requests.

    q, out: [rows, query heads, head_dim]. k, v: [rows, KV heads, head_dim].
    k_cache, v_cache: [slots, KV heads, head_dim], also in 8 bits.
    qo_indptr: int [n + 1], the requests' rows. kv_indptr: int32 [n + 1], where a request's context
    is in kv_indices: int64, slots.
    mask: uint8 [width, width], of each request's new rows, or None: causal; for SGLang's kernel
    [width, context + width] of each request, from mask_indptr on.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    mask: torch.Tensor | None
    is_causal: bool
    mask_indptr: torch.Tensor | None
    width: int
    k_scale: float
    v_scale: float
    sm_scale: float


class SplitKV:
    """Attention of requests that all have ``width`` rows; or any, whose sum is that of a graph.

    Args:
        stock: SGLang's ``extend_attention_fwd``.
        width: rows of a request.
        max_reqs: requests of the largest call.
        max_context: tokens of the longest context.
        heads: query heads, KV heads and head_dim of a layer.
        device: where the buffers are, which all layers share.
        max_rows: of the largest call, where requests have different rows; 0 where all have
            ``width``.
    """

    def __init__(
        self,
        stock: Callable[..., None],
        width: int,
        max_reqs: int,
        max_context: int,
        heads: tuple[int, int, int],
        device: Any,
        max_rows: int = 0,
    ) -> None:
        num_heads, self._num_kv_heads, dim = heads
        self._stock, self._group = stock, num_heads // self._num_kv_heads
        self._is_ragged, self._is_long = max_rows > 0, max_context >= LONG
        self._num_sms, self._shared_memory = device_limits()
        self._tiles: torch.Tensor | None = None
        rows = range(1, max_rows + 1) if max_rows else range(width, max_reqs * width + 1, width)
        items = max(n * self._num_parts(n, 0 if max_rows else width)[0] for n in rows) * num_heads
        self._lse = torch.empty(items, dtype=torch.float32, device=device)
        self._partial = self._lse.new_empty(items * dim)

    @property
    def num_bytes(self) -> int:
        """Of the buffers."""
        return self._lse.nbytes + self._partial.nbytes

    def plan(self, lens: torch.Tensor, num_rows: int) -> None:
        """Computes, on the device, whose rows a program has, where requests have different ones.

        Args:
            lens: int64 [n] rows of each request.
            num_rows: their sum.
        """
        rows = _block_of(num_rows * self._group)
        blocks = (lens * self._group + rows - 1) // rows
        ends = blocks.cumsum(0)
        # Each request may leave its last block partly empty.
        most = num_rows * self._group // rows + len(lens)
        tile = torch.arange(most, device=lens.device)
        request = torch.searchsorted(ends, tile, right=True)
        is_none = request == len(lens)
        request = request.masked_fill(is_none, 0)
        block = tile - (ends - blocks)[request]
        self._tiles = torch.stack((request.masked_fill(is_none, -1), block))

    def extend_attention_fwd(self, *args: Any, **options: Any) -> None:
        """Writes ``out``; what the kernels here do not do is left to SGLang's.

        Raises:
            NotImplementedError: SGLang's would need a mask that includes the context.
        """
        call = _Call(*args)
        # Two loops with 8-bit KV, one over it and one over the new rows.
        itemsize = call.q.element_size() + (call.k_cache.dtype in FP8)
        stages = tiles_that_fit(call.q.shape[2], itemsize, self._shared_memory)
        num_parts, splits = self._num_parts(len(call.q), 0 if self._is_ragged else call.width)
        if stages is None or not self._is_ours(call, options, num_parts):
            if call.mask is not None:
                raise NotImplementedError("attention with a mask beyond scale and full KV")
            self._stock(*call, **options)
            return
        packed = (len(call.q) if self._is_ragged else call.width) * self._group
        rows = _block_of(packed)
        num_reqs, tiles = len(call.qo_indptr) - 1, self._tiles
        num_tiles = num_reqs * triton.cdiv(packed, rows) if tiles is None else tiles.shape[1]
        self._attend(call, rows, (num_tiles, self._num_kv_heads, num_parts), splits, stages)
        self._combine(call, num_parts, splits)

    def _attend(
        self,
        call: _Call,
        rows: int,
        grid: tuple[int, int, int],
        splits: int,
        stages: tuple[int, int],
    ) -> None:
        """Attends to each part of the KV by itself."""
        dim, (tile, num_stages) = call.q.shape[2], stages
        tensors = (call.q, call.k, call.v, call.k_cache, call.v_cache)
        attend_part[grid](
            *(part for tensor in tensors for part in (tensor, tensor.stride(0), tensor.stride(1))),
            call.qo_indptr,
            call.kv_indptr,
            call.kv_indices,
            call.mask,
            self._tiles,
            self._partial,
            self._lse,
            call.sm_scale * _LOG2_E,
            call.k_scale,
            call.v_scale,
            call.width,
            splits,
            self._group,
            dim,
            triton.next_power_of_2(dim),
            rows,
            tile,
            call.k_cache.dtype != call.q.dtype,
            LONG,
            num_warps=WARPS,
            num_stages=num_stages,
        )

    def _combine(self, call: _Call, num_parts: int, splits: int) -> None:
        num_tokens, num_heads, dim = call.q.shape
        num_items = num_tokens * num_heads
        combine[(triton.cdiv(num_items, _COMBINED),)](
            self._partial,
            self._lse,
            call.out,
            call.out.stride(0),
            call.out.stride(1),
            num_items,
            num_heads,
            dim,
            triton.next_power_of_2(dim),
            num_parts,
            1 + splits,
            _COMBINED,
        )

    def _is_ours(self, call: _Call, options: dict[str, Any], num_parts: int) -> bool:
        """Whether scores depend on scale and mask alone, KV is not latent, and rows and buffers
        are as announced."""
        q, k, v, caches = call.q, call.k, call.v, (call.k_cache, call.v_cache)
        asked = {name: value for name, value in options.items() if name not in _NO_MATTER}
        num_items = num_parts * q.shape[0] * q.shape[1]
        is_fp8 = caches[0].dtype in FP8
        return (
            call.is_causal
            and asked.items() <= _PLAIN.items()
            and k.dtype == v.dtype == q.dtype
            and caches[0].dtype == caches[1].dtype
            and (is_fp8 or (caches[0].dtype == q.dtype and call.k_scale == call.v_scale == 1.0))
            and all(part.shape[1:] == (k.shape[1], q.shape[2]) for part in (k, v, *caches))
            and (self._is_ragged or len(q) == (len(call.qo_indptr) - 1) * call.width)
            and num_items <= len(self._lse)
            and num_items * q.shape[2] <= len(self._partial)
        )

    def _num_parts(self, num_rows: int, width: int) -> tuple[int, int]:
        """Parts of the longest context, and one for the new rows; and parts of a short context.

        Args:
            num_rows: of all requests; where they differ (``width`` 0), a graph has at least half
                of them in use.
        """
        packed = (width or num_rows) * self._group
        blocks = triton.cdiv(packed, _block_of(packed)) * (num_rows // width if width else 1)
        num_programs = self._num_kv_heads * (blocks if width else max(1, blocks // 2))

        def splits(programs_per_sm: int, most: int) -> int:
            return min(triton.cdiv(programs_per_sm * self._num_sms, num_programs), most)

        short = splits(PROGRAMS_PER_SM, MAX_SPLITS)
        longest = splits(LONG_PROGRAMS_PER_SM, MAX_LONG_SPLITS) if self._is_long else short
        return 1 + longest, short


def device_limits() -> tuple[int, int]:
    """(SMs, bytes of shared memory per block) of the process's GPU; of Triton's interpreter without
    one."""
    if not torch.cuda.is_available():
        return 16, sys.maxsize
    gpu = torch.cuda.get_device_properties()
    return gpu.multi_processor_count, getattr(gpu, "shared_memory_per_block_optin", 0)


def tiles_that_fit(dim: int, itemsize: int, shared_memory: int) -> tuple[int, int] | None:
    """(KV tokens at a time, tiles loaded ahead) of a program; fewer where the GPU's shared memory
    holds no more, as at a head_dim of 256 below 172 KB; None where it holds none."""
    row_size = triton.next_power_of_2(dim) * itemsize
    return next(
        (
            (tile, ahead)
            for tile, ahead in ((TILE, STAGES), (TILE, 1), (TILE // 2, 1))
            if (MAX_BLOCK + 2 * ahead * tile) * row_size + 2 * MAX_BLOCK * tile <= shared_memory
        ),
        None,
    )


def _block_of(packed: int) -> int:
    """Rows x query heads of a program; a matrix product has at least 16."""
    return min(max(triton.next_power_of_2(packed), 16), MAX_BLOCK)
