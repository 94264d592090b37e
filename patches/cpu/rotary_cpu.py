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


PATCH = Patch("rotary_cpu", _register, _is_applied, on_cpu_only)
