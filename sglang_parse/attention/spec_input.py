"""PARSE's speculative inputs, as members of SGLang's ``SpecInputType``.

The enum is closed and SGLang dispatches on its members. Between iterations PARSE is an EAGLE draft;
its verify pass has the ``select_index`` of EAGLE's draft extend, which makes the logits processor
compute the selected rows only: a pass of 1,000 rows over a vocabulary of 150,000 would take 0.6 GB.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

from sglang_parse.core.layout import VerifyLayout
from sglang_parse.device import on_device

LAID_OUT = ForwardMode.DRAFT_EXTEND_V2
"""The mode of a forward whose rows are not causal: PARSE's attention backends plan it."""


def forward_mode_of(layout: VerifyLayout) -> ForwardMode:
    """A causal pass is a chunk of a prefill, which every attention backend and layer knows; many
    give draft extends a fixed width, or leave a layer out."""
    return ForwardMode.EXTEND if layout.is_causal else LAID_OUT


class ParseDraftInput(SpecInput):
    """The scheduler's input between iterations: empty, because the state is on each ``Req``."""

    # Read by ``RelayPayload.from_draft_input`` of the overlap schedule.
    bonus_tokens = topk_p = topk_index = hidden_states = dsa_topk_indices = None

    def __init__(self) -> None:
        super().__init__(SpecInputType.EAGLE_DRAFT)
        self.capture_hidden_mode = CaptureHiddenMode.NULL

    def filter_batch(self, *_: object, **__: object) -> None:
        """Nothing to filter."""

    def merge_batch(self, other: object) -> None:
        """Nothing to merge."""


@dataclass(kw_only=True)
class ParseVerifyInput(SpecInput):
    """The verify pass, for attention backends and the logits processor.

    Attributes:
        layout: rows of the pass; requests that only decode have one row and no question.
        custom_mask: bool [layout.mask_size], see ``mask.flat_mask``; None if the pass runs as
            pseudo-sequences.
        select_index: int64 [n] rows whose logits are computed, in the order they are returned.
        starts: int64 [num_requests] the lengths of the requests' contexts if only the device
            knows them: ``layout`` then has their upper bounds, and ``custom_mask`` is from
            ``mask.flat_mask_at``.
    """

    layout: VerifyLayout
    custom_mask: torch.Tensor | None
    select_index: torch.Tensor
    starts: torch.Tensor | None = None
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL
    hidden_states: torch.Tensor | None = None
    num_tokens_per_req: int = 1
    num_tokens_for_logprob_per_req: int = 1
    spec_input_type: SpecInputType = field(init=False)

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.EAGLE_DRAFT_EXTEND)
        if self.custom_mask is not None and self.custom_mask.numel() != self.layout.mask_size:
            raise ValueError(
                f"mask has {self.custom_mask.numel()} entries, "
                f"the layout needs {self.layout.mask_size}"
            )

    @property
    def is_stock(self) -> bool:
        """Whether stock backends plan it right, as a prefill: causal, with lengths on the host."""
        return self.layout.is_causal and self.starts is None

    def generate_attn_arg_prefill(
        self,
        *,
        req_pool_indices: torch.Tensor,
        paged_kernel_lens: torch.Tensor,
        paged_kernel_lens_sum: int,
        translator: Any,
        plan: Any,
        kind: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Returns the arguments with which SGLang's FlashInfer backend plans a masked pass.

        As ``EagleVerifyInput.generate_attn_arg_prefill``: int32 kv_indices [sum of lengths],
        kv_indptr [n + 1], qo_indptr [n + 1], and the mask.
        """
        device = req_pool_indices.device
        kv_indptr = on_device(self.layout.kv_indptr, device, torch.int32)
        qo_indptr = on_device(self.layout.qo_indptr, device, torch.int32)
        kv_indices = torch.empty(paged_kernel_lens_sum, dtype=torch.int32, device=device)
        translator.pack_read_stream(
            plan,
            req_pool_indices=req_pool_indices,
            seq_lens=paged_kernel_lens,
            indptr=kv_indptr,
            out=kv_indices,
            kind=kind,
            num_token_blocks=None,
            kv_lens_sum=paged_kernel_lens_sum,
        )
        return kv_indices, kv_indptr, qo_indptr, self.custom_mask
