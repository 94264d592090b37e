"""SGLang's FlashAttention 3 takes no mask: passes with questions run as pseudo-sequences."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
from sglang.srt.utils import get_device_capability

from sglang_parse.attention.alias import indptr, kv_offsets, page_table
from sglang_parse.attention.spec_input import ParseVerifyInput
from sglang_parse.attention.support import BackendError


class ParseFlashAttentionBackend(FlashAttentionBackend):
    """``FlashAttentionBackend`` that asks questions without a mask, with pages of one slot."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        spec_info = forward_batch.spec_info
        if not isinstance(spec_info, ParseVerifyInput) or spec_info.is_stock:
            return
        sequences, starts = spec_info.layout.pseudo_sequences(), spec_info.starts
        slots = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices]
        num_rows = [sequence.num_rows for sequence in sequences]
        kv_lens = [sequence.kv_len for sequence in sequences]
        metadata = self.forward_metadata
        metadata.cu_seqlens_q = indptr(num_rows, slots.device)
        metadata.cu_seqlens_k = kv_offsets(kv_lens, sequences, slots.device, starts)
        metadata.cache_seqlens_int32 = torch.diff(metadata.cu_seqlens_k)
        metadata.max_seq_len_q, metadata.max_seq_len_k = max(num_rows), max(kv_lens)
        metadata.page_table = page_table(sequences, slots, starts)


def create_backend(runner: Any) -> ParseFlashAttentionBackend:
    """Like ``attention_registry.create_flashattention_v3_backend``."""
    capability = get_device_capability()
    if not (8, 0) <= capability < (10, 0):
        found = f"--attention-backend is 'fa3' on a device of compute capability {capability}"
        raise BackendError(found, "use flashinfer or triton; FlashAttention 3 runs on 8.0 to 9.0")
    return ParseFlashAttentionBackend(runner)
