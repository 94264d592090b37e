"""SGLang's ``torch_native`` attention for the CPU, with PARSE's mask.

Takes the flat mask FlashInfer takes (row-major, query first, full KV length, requests
concatenated); everything that is not a verification pass goes to the stock backend.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.attention_registry import (
    ATTENTION_BACKENDS,
    register_attention_backend,
)
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch.nn.functional import scaled_dot_product_attention

from sglang_parse.mask import split_flat_mask
from sglang_parse.spec_input import ParseVerifyInput

NAME = "torch_native"


class _RequestPart(NamedTuple):
    """One request's share of a masked pass.

    rows: its query rows; kv_slots: int [kv_len] slots of its keys; mask: bool [rows, kv_len].
    """

    rows: slice
    kv_slots: torch.Tensor
    mask: torch.Tensor


class MaskedTorchNativeBackend(TorchNativeAttnBackend):
    """``TorchNativeAttnBackend`` that honours ``ParseVerifyInput.custom_mask``."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._parts: list[_RequestPart] = []

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        spec_info = forward_batch.spec_info
        self._parts = []
        if isinstance(spec_info, ParseVerifyInput):
            self._parts = self._split(forward_batch, spec_info)

    def _split(self, forward_batch: Any, spec_info: ParseVerifyInput) -> list[_RequestPart]:
        masks = split_flat_mask(spec_info.custom_mask, spec_info.layout)
        table = self.req_to_token_pool.req_to_token
        indptr = spec_info.layout.qo_indptr
        parts = []
        for i, (request, mask) in enumerate(zip(spec_info.layout.requests, masks, strict=True)):
            kv_slots = table[forward_batch.req_pool_indices[i], : request.kv_len]
            parts.append(_RequestPart(slice(indptr[i], indptr[i + 1]), kv_slots, mask))
        return parts

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        if not isinstance(forward_batch.spec_info, ParseVerifyInput):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        if save_kv_cache:
            loc = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, loc, k, v)
        return self._masked(q, layer)

    def _masked(self, q: torch.Tensor, layer: Any) -> torch.Tensor:
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        output = q.new_empty(query.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        for part in self._parts:
            attended = scaled_dot_product_attention(
                query[part.rows].transpose(0, 1).unsqueeze(0),
                keys[part.kv_slots].transpose(0, 1).unsqueeze(0).to(q.dtype),
                values[part.kv_slots].transpose(0, 1).unsqueeze(0).to(q.dtype),
                attn_mask=part.mask,
                scale=layer.scaling,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            )
            output[part.rows] = attended.squeeze(0).transpose(0, 1)
        return output.view(query.shape[0], -1)


def register_masked_backend() -> None:
    """Put the masked backend into SGLang's registry under the stock name. Idempotent."""
    if not is_registered():
        register_attention_backend(NAME)(MaskedTorchNativeBackend)


def is_registered() -> bool:
    return ATTENTION_BACKENDS.get(NAME) is MaskedTorchNativeBackend
