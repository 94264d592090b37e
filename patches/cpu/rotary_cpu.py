"""Rotary embedding without vLLM's compiled kernel on a CPU (ledger: rotary_cpu)."""

from __future__ import annotations

from sglang_parse.patches.base import Patch, on_cpu_only


def _register() -> None:
    # The value is a bool, so SGLang's hook registry must not touch it: it would rewrite every
    # module attribute that is the same object, True or False.
    from sglang.srt.layers.rotary_embedding import base

    base._is_cpu = True


def _is_applied() -> bool:
    from sglang.srt.layers.rotary_embedding import base

    return base._is_cpu is True


PATCH = Patch(
    "rotary_cpu",
    targets={"sglang.srt.layers.rotary_embedding.base._is_cpu": ()},
    register=_register,
    is_applied=_is_applied,
    why="on a CPU without SGLang's compiled CPU kernels the module imports "
    "`vllm._custom_ops`, which is not installed.",
    how="sets the flag, so that the layer's own PyTorch forward is used. Only on machines "
    "without an accelerator. Not by SGLang's hooks: they replace by identity, and the "
    "value is a bool.",
    removed_when="the module falls back to its PyTorch forward by itself.",
    is_needed=on_cpu_only,
)
