"""SGLang's Triton attention with PARSE's verify pass.

Its extend kernel reads the context's KV through slot numbers, takes the new rows' KV as tensors and
applies a custom mask to the new rows only, which is all that PARSE needs.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

from sglang_parse.attention.alias import paged_rows
from sglang_parse.attention.spec_input import ParseVerifyInput
from sglang_parse.device import on_device


class ParseTritonBackend(TritonAttnBackend):
    """``TritonAttnBackend`` that runs verify passes in PARSE's layouts."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        # The stock backend plans the pass causally, as a prefill.
        super().init_forward_metadata(forward_batch)
        spec_info = forward_batch.spec_info
        if not isinstance(spec_info, ParseVerifyInput) or spec_info.is_stock:
            return
        if spec_info.custom_mask is None:
            self._plan_alias(spec_info, forward_batch)
        else:
            self.forward_metadata.custom_mask = spec_info.custom_mask
            self.forward_metadata.mask_indptr = _mask_indptr(spec_info, self.device)

    def _plan_alias(self, spec_info: ParseVerifyInput, forward_batch: Any) -> None:
        slots = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices]
        sequences, starts = spec_info.layout.pseudo_sequences(), spec_info.starts
        rows = paged_rows(sequences, slots, with_own=False, starts=starts)
        metadata = self.forward_metadata
        metadata.qo_indptr, metadata.kv_indptr = rows.qo_indptr, rows.kv_indptr
        metadata.kv_indices = rows.kv_slots.to(torch.int64)
        metadata.max_extend_len = rows.longest
        if window := self.sliding_window_size:  # layers with windows read these
            rows = paged_rows(sequences, slots, with_own=False, window=window)
            metadata.window_kv_indptr = rows.kv_indptr
            metadata.window_kv_indices = rows.kv_slots.to(torch.int64)


def _mask_indptr(spec_info: ParseVerifyInput, device: torch.device) -> torch.Tensor:
    """Returns int64 [num_requests + 1], the offsets of the requests' masks in the flat mask."""
    if spec_info.starts is None:
        return on_device(spec_info.layout.mask_indptr, device)
    num_rows = spec_info.layout.requests[0].num_rows
    sizes = num_rows * (spec_info.starts + num_rows)
    return torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
