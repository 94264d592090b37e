"""Latent attention (MLA) on a CPU."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

from sglang_parse.attention.support import ON_CPU
from sglang_parse.patches.base import Patch, Registration, around

_FACTORY = "sglang.srt.layers.rotary_embedding.factory"
_HANDLER = "sglang.srt.models.deepseek_common.attention_backend_handler"
_WAYS = f"{_HANDLER}.AttentionBackendRegistry"


def _in_pytorch(original: Callable, *shape: Any) -> Any:
    """``get_rope_wrapper`` gives both the same arguments, all by position."""
    *shared, rope_scaling, dtype, partial_rotary_factor, device = shape
    if rope_scaling is not None:
        rope = original(*shape)
        rope._forward_method = rope.forward_native  # its own, where another's would be called
        return rope
    del device
    get_rope = pkgutil.resolve_name(f"{_FACTORY}.get_rope")
    return get_rope(*shared, None, dtype, partial_rotary_factor)


def _put() -> None:
    pkgutil.resolve_name(_WAYS).register(ON_CPU, _absorbed())


def _absorbed() -> Any:
    return pkgutil.resolve_name(f"{_HANDLER}._dispatch_mla_subtype")


PATCH = Patch(
    "mla",
    {
        f"{_FACTORY}.get_rope_cpu": around(_in_pytorch),
        _WAYS: Registration(
            put=_put,
            is_put=lambda: pkgutil.resolve_name(_WAYS).get_handler(ON_CPU) is _absorbed(),
        ),
    },
    why="SGLang knows no way of latent attention for `torch_native` and takes Triton's, which "
    "expands a prompt's KV and then reads it as latent KV. `get_rope_cpu` refuses models whose "
    "rotary embedding is not scaled, and what it makes of others needs kernels for AMX: without "
    "them it is called with an argument that it does not have.",
    how="`torch_native` runs latent attention over latent KV in every forward, as decode steps "
    "do. Unscaled rotary embeddings are those of other devices, and scaled ones use their PyTorch "
    "forward. Only on machines without an accelerator.",
    removed_when="`torch_native` has a handler, and `get_rope_cpu` needs no AMX for any model.",
)
