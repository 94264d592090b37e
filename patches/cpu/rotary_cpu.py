"""Rotary embedding in plain PyTorch on a CPU (ledger: rotary_cpu)."""

from __future__ import annotations

from sglang_parse.patches.base import Patch, Value

PATCH = Patch(
    "rotary_cpu",
    {"sglang.srt.layers.rotary_embedding.base._is_cpu": Value(True)},
    why="on a CPU without SGLang's compiled CPU kernels the module imports "
    "`vllm._custom_ops`, which is not installed.",
    how="sets the flag, so that the layer's own PyTorch forward is used. Only on machines "
    "without an accelerator. Not by SGLang's hooks: they replace by identity, and the "
    "value is a bool.",
    removed_when="the module falls back to its PyTorch forward by itself.",
)
