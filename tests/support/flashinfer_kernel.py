"""FlashInfer's paged prefill, planned for each launch as in SGLang."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from support.paged_inputs import PagedInputs


@dataclass(frozen=True)
class Kernel:
    """One workspace, as in a server. FA2 is its only kernel with a mask."""

    workspace: torch.Tensor

    def __call__(self, inputs: PagedInputs) -> torch.Tensor:
        """[qo_indptr[-1], num_qo, dim]."""
        return self.run(self.planned(inputs), inputs)

    def planned(self, inputs: PagedInputs) -> Any:
        import flashinfer

        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self.workspace, "NHD", backend="fa2"
        )
        wrapper.plan(
            inputs.qo_indptr,
            inputs.kv_indptr,
            inputs.kv_indices,
            inputs.last_page_len,
            num_qo_heads=inputs.queries.shape[1],
            num_kv_heads=inputs.key_cache.shape[2],
            head_dim_qk=inputs.queries.shape[2],
            page_size=inputs.page_size,
            custom_mask=inputs.custom_mask,
            causal=inputs.custom_mask is None,
            q_data_type=inputs.queries.dtype,
            kv_data_type=inputs.key_cache.dtype,
        )
        return wrapper

    @staticmethod
    def run(wrapper: Any, inputs: PagedInputs) -> torch.Tensor:
        return wrapper.run(inputs.queries, (inputs.key_cache, inputs.value_cache))
