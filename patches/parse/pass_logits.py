"""Logits of a causal verify pass's selected rows (ledger: pass_logits)."""

from __future__ import annotations

from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_parse.attention.spec_input import ParseVerifyInput
from sglang_parse.patches.base import Patch, after


def _select_rows(metadata: Any, _cls: type, forward_batch: Any) -> None:
    spec_info = forward_batch.spec_info
    if isinstance(spec_info, ParseVerifyInput):
        metadata.forward_mode = ForwardMode.DRAFT_EXTEND_V2
        metadata.draft_extend_select_index = spec_info.select_index


_METADATA = "sglang.srt.layers.logits_processor.LogitsMetadata"
PATCH = Patch(
    "pass_logits",
    {f"{_METADATA}.from_forward_batch": after(_select_rows)},
    why="a causal verify pass is a chunk of a prefill to every layer and attention backend, but a "
    "prefill's logits are those of each request's last row. `DRAFT_EXTEND_V2`, whose logits are "
    "those of selected rows, is no mode for the whole forward: linear attention skips its state, "
    "and FlashMLA, TRT-LLM and FlashInfer's MLA plan rows of one fixed number per request.",
    how="a verify pass has the logits of the rows that it selects, whatever its forward mode.",
    removed_when="a prefill can select the rows whose logits it computes.",
)
