"""Triton attention of forwards in a CUDA graph: all of its plan is made in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import triton
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sglang_parse.attention.split_kv import ENV_VAR, SplitKV, device_limits, tiles_that_fit
from sglang_parse.core.layout import RequestLayout
from sglang_parse.core.mask import entries_of_rows, qlen_only_mask

PACKED = 4096
"""Slots of a request that one program packs into ``kv_indices``."""
_PREFIXES = ("qo_indptr", "kv_indptr", "mask_indptr", "window_kv_indptr")


class WideTritonBackend(TritonAttnBackend):
    """Attention of requests that all have the same rows, or any.

    Each request's rows attend to its tokens [0, seq_len) by slot number and to one another as the
    layout says, whatever attention backend the model's other forwards use. Lengths and mask are
    computed in the graph, from tensors on the device (``WideInputs``).

    Args:
        runner: the model's runner.
        rows: a request's rows, without context; of causal rows that differ, most.
        lens: int64 [n] rows of each request, where they differ, on the device.
        slots: int64 [n * context] of other graphs with as many requests, which each replay writes.

    Attributes:
        splits: whether each layer's context is split among programs (``split_kv``).
    """

    enable_deterministic: bool
    extend_attention_fwd: Callable[..., None]

    def __init__(
        self,
        runner: Any,
        rows: RequestLayout,
        lens: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
    ) -> None:
        super().__init__(runner)
        # The number of parts depends on that of the requests; latent KV is SGLang's kernel's.
        is_able = not self.enable_deterministic and not self.use_mla
        self._can_split = is_able and os.environ.get(ENV_VAR) != "0"
        self.splits = self._can_split and _is_plain(runner)
        # That kernel would read the context's part of the mask; SGLang's other does not split.
        self.enable_deterministic = False
        self.max_kv_splits = 1  # of decode steps, which have no buffers here
        self.num_draft_tokens = None  # nor has SGLang's mask
        self._width, self._lens, self._slots = rows.num_rows, lens, slots
        self._mask: torch.Tensor | None = None
        self._tail = None if rows.is_causal else qlen_only_mask(rows, runner.device).to(torch.uint8)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *_: Any, **__: Any) -> None:
        """Allocates what graphs of up to ``max_bs`` requests read; no buffers of decode steps."""
        lens, max_reqs = self._lens, max_bs if self._lens is None else len(self._lens)
        for name in _PREFIXES if lens is not None else ():
            if (part := getattr(self, name)) is not None:  # SGLang's has no room for padding
                setattr(self, name, part.new_zeros(max_reqs + 1))
        slots = self._slots
        if slots is None:
            num_slots = max_reqs * self.max_context_len
            slots = torch.zeros(num_slots, dtype=torch.int64, device=self.device)
        super().init_cuda_graph_state(max_reqs, max_reqs, kv_indices_buf=slots)
        if self._tail is not None and self.splits:
            self._mask = self._tail.flatten()
        elif self._tail is not None:
            num_entries = max_bs * self._width * (self.max_context_len + self._width)
            self._mask = torch.zeros(num_entries, dtype=torch.uint8, device=self.device)
        if self._can_split:
            heads = self.num_head, self.num_kv_head, self.v_head_dim
            sizes = self._width, max_reqs, self.max_context_len, heads, self.device
            most = max_num_tokens if lens is not None else 0
            self._split = SplitKV(self.extend_attention_fwd, *sizes, max_rows=most)
            self.extend_attention_fwd = torch.compiler.disable(self._split.extend_attention_fwd)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Binds the plan's tensors, once for each graph."""
        if in_capture:
            self.forward_metadata = self._build_cuda_graph_forward_metadata(
                forward_batch.batch_size, forward_batch.forward_mode, forward_batch.spec_info
            )
            self.forward_metadata.custom_mask = self._mask

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Computes the plan, as part of the graph."""
        size, starts = forward_batch.batch_size, forward_batch.seq_lens
        self._update_target_verify_buffers(
            forward_batch.kv_loc_plan,
            size,
            starts,
            forward_batch.spec_info,
            forward_batch.req_pool_indices,
        )
        if self._lens is not None:
            lens = self._lens[:size]
            self.qo_indptr[1 : size + 1] = lens.cumsum(0)
            if self._can_split:
                self._split.plan(lens, len(forward_batch.input_ids))
        if self._mask is not None and self._tail is not None and not self.splits:
            # The kernel does not read the context's part of the mask.
            self._mask[entries_of_rows(starts, self._width)] = self._tail

    def _fill_kv_indptr_and_indices(
        self,
        plan: Any,
        bs: int,
        seq_lens: torch.Tensor,
        req_pool_indices: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_indptr: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As SGLang's, which walks through a request's context in one program, in every replay."""
        kv_indptr = self.kv_indptr[: bs + 1] if kv_indptr is None else kv_indptr
        kv_indptr[1:] = seq_lens.cumsum(0)
        self.kv_index_translator.pack_read_stream(
            plan,
            req_pool_indices=req_pool_indices,
            seq_lens=seq_lens[:bs],
            indptr=kv_indptr,
            out=kv_indices,
            num_token_blocks=triton.cdiv(self.max_context_len, PACKED),
        )
        return kv_indptr

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **other: Any,
    ) -> torch.Tensor:
        """As SGLang's, without its copies of K and V: the kernel takes strides."""
        is_usual = save_kv_cache and k is not None and layer.k_scale is None
        if not (self.splits and is_usual) or any(part is not None for part in other.values()):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **other)
        pool, plan = self.token_to_kv_pool, self.forward_metadata
        self._set_kv_buffer(forward_batch, layer, KVWriteLoc.for_batch(forward_batch), k, v)
        out, heads = torch.empty_like(q), (-1, layer.tp_q_head_num, layer.head_dim)
        self.extend_attention_fwd(
            q.view(heads),
            k,
            v,
            out.view(heads),
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            plan.qo_indptr,
            plan.kv_indptr,
            plan.kv_indices,
            plan.custom_mask,
            True,
            plan.mask_indptr,
            plan.max_extend_len,
            1.0,
            1.0,
            layer.scaling,
        )
        return out


def _is_plain(runner: Any) -> bool:
    """Whether the split kernel serves all layers of a model on this GPU."""
    layers = [part for part in runner.model.modules() if isinstance(part, RadixAttention)]
    memory = device_limits()[1]
    return all(
        layer.logit_cap == 0.0
        and layer.xai_temperature_len == -1
        and layer.sliding_window_size in (None, -1)
        and not layer.is_cross_attention
        and layer.qk_head_dim == layer.v_head_dim
        and tiles_that_fit(layer.head_dim, runner.dtype.itemsize, memory)
        for layer in layers
    )
