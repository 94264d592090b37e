"""Triton attention of forwards with one width in a CUDA graph: all of its plan is made in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

from sglang_parse.attention.split_kv import ENV_VAR, SplitKV
from sglang_parse.core.layout import RequestLayout
from sglang_parse.core.mask import entries_of_rows, qlen_only_mask


class WideTritonBackend(TritonAttnBackend):
    """Attention of requests that all have the same rows.

    Each request's rows attend to its tokens [0, seq_len) by slot number and to one another as the
    layout says, whatever attention backend the model's other forwards use. Lengths and mask are
    computed in the graph, from tensors on the device (``WideInputs``).

    Args:
        runner: the model's runner.
        rows: a request's rows, without context.

    Attributes:
        splits: whether a request's context is split among programs (``split_kv``).
    """

    enable_deterministic: bool
    extend_attention_fwd: Callable[..., None]

    def __init__(self, runner: Any, rows: RequestLayout) -> None:
        super().__init__(runner)
        # The number of parts depends on that of the requests; latent KV is SGLang's kernel's.
        is_able = not self.enable_deterministic and not self.use_mla
        self.splits = is_able and os.environ.get(ENV_VAR) != "0"
        # That kernel would read the context's part of the mask; SGLang's other does not split.
        self.enable_deterministic = False
        self._width = rows.num_rows
        self._mask: torch.Tensor | None = None
        self._tail = None if rows.is_causal else qlen_only_mask(rows, runner.device).to(torch.uint8)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *_: Any, **__: Any) -> None:
        """Allocates what graphs of up to ``max_bs`` requests read; no buffers of decode steps."""
        del max_num_tokens
        slots = torch.zeros(max_bs * self.max_context_len, dtype=torch.int64, device=self.device)
        super().init_cuda_graph_state(max_bs, max_bs, kv_indices_buf=slots)
        if self._tail is not None:
            num_entries = max_bs * self._width * (self.max_context_len + self._width)
            self._mask = torch.zeros(num_entries, dtype=torch.uint8, device=self.device)
        if self.splits:
            heads = self.num_head, self.num_kv_head, self.v_head_dim
            split = SplitKV(self.extend_attention_fwd, self._width, max_bs, heads, self.device)
            self.extend_attention_fwd = torch.compiler.disable(split.extend_attention_fwd)

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
        if self._mask is not None and self._tail is not None:
            # The kernel does not read the context's part of the mask.
            self._mask[entries_of_rows(starts, self._width)] = self._tail
