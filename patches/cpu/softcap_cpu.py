"""Capped logits in plain PyTorch on a CPU (ledger: softcap_cpu)."""

from __future__ import annotations

from sglang_parse.patches.base import Patch, Value, on_cpu_only

PATCH = Patch(
    "softcap_cpu",
    {"sglang.srt.layers.logits_processor._is_cpu": Value(True)},
    why="without SGLang's compiled CPU kernels the logits of Gemma 2 are capped by a Triton "
    "kernel, and the server ends with its first request.",
    how="sets the flag, so that the module's own PyTorch caps them. Only on machines without an "
    "accelerator. Not by SGLang's hooks, as in `rotary_cpu`.",
    removed_when="the module falls back to PyTorch by itself.",
    is_needed=on_cpu_only,
)
