"""Verify passes over latent KV (MLA) do not expand it (ledger: latent_passes)."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

from sglang_parse.attention.spec_input import ParseVerifyInput
from sglang_parse.patches.base import Patch, around

_HANDLER = "sglang.srt.models.deepseek_common.attention_backend_handler"


def _absorb(original: Callable, attn: Any, forward_batch: Any, backend_name: str) -> Any:
    if isinstance(forward_batch.spec_info, ParseVerifyInput):
        return pkgutil.resolve_name(f"{_HANDLER}._dispatch_mla_subtype")(attn, forward_batch)
    return original(attn, forward_batch, backend_name)


PATCH = Patch(
    "latent_passes",
    {f"{_HANDLER}._handle_attention_backend": around(_absorb)},
    why="a causal verify pass is a chunk of a prefill. Where the contexts of a batch have 8,192 "
    "tokens, SGLang expands their latent KV to keys and values of every head, in every layer, "
    "which pays for the thousands of rows of such a chunk: for the hundred of a pass at 131,072 "
    "tokens of DeepSeek V3 it is 34 TFLOP per rank of eight, many times the pass itself.",
    how="a verify pass attends over the latent KV, as decode steps and shorter prefills do, on "
    "FlashInfer, FA3, FlashMLA, Intel XPU and, on SM100, FA4; Triton's handler does so already. On "
    "TRT-LLM, aiter and FA4 elsewhere kernels and plans depend on the expansion: a line of the "
    "start says so.",
    removed_when="SGLang chooses by the number of rows, or a spec input can.",
)
