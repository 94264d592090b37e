"""Capped logits in plain PyTorch on a CPU."""

from __future__ import annotations

from sglang_parse.patches.base import Patch, Value

PATCH = Patch(
    "softcap",
    {"sglang.srt.layers.logits_processor._is_cpu": Value(True)},
    why="without SGLang's compiled CPU kernels the logits of Gemma 2 are capped by a Triton "
    "kernel, and the server ends with its first request.",
    how="sets the flag, so that the module's own PyTorch caps them. Not by SGLang's hooks, as in "
    "`rotary_cpu`.",
    removed_when="the module falls back to PyTorch by itself.",
)
