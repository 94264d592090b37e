"""Experts of Nemotron 3 and Ernie 4.5 in plain PyTorch on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_parse.patches.base import Patch, Registration, Value, around


def _squared(
    original: Callable,
    layer: Any,
    x: torch.Tensor,
    topk_output: Any,
    moe_runner_config: Any,
) -> torch.Tensor:
    """x [tokens, hidden]; ``w13_weight`` [experts, width, hidden] has no gates."""
    if moe_runner_config.activation != "relu2":
        return original(layer, x, topk_output, moe_runner_config)
    weights, experts = topk_output.topk_weights, topk_output.topk_ids
    wide = torch.einsum("ti,tkoi->tko", x, layer.w13_weight[experts]).relu().square()
    out = torch.einsum("tko,tkio->tki", wide, layer.w2_weight[experts])
    out = (out * weights[:, :, None]).sum(1) * (moe_runner_config.routed_scaling_factor or 1.0)
    return out.to(x.dtype)


def _mm(self: torch.Tensor, mat2: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return torch.mm(self.to(out_dtype), mat2.to(out_dtype))


_OPERATOR = "aten::mm.dtype"
_LIBRARY = torch.library.Library("aten", "IMPL")


def _put() -> None:
    _LIBRARY.impl("mm.dtype", _mm, "CPU")


def _is_put() -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(_OPERATOR, "CPU")


PATCH = Patch(
    "experts",
    {
        "sglang.srt.layers.moe.fused_moe_native.moe_forward_native": around(_squared),
        "torch.mm": Registration(_put, _is_put),
        "sglang.srt.models.ernie4._is_cpu": Value(True),
    },
    why="the router of Nemotron 3 multiplies with `out_dtype`, which PyTorch has for GPUs only, "
    "and SGLang's PyTorch experts know neither its activation nor its scale. Ernie's router has a "
    "bias of two dimensions but where SGLang's compiled CPU kernels are.",
    how="a CPU kernel of that operator, and experts with that activation in plain PyTorch; "
    "Ernie's module sees a CPU. Only on machines without an accelerator.",
    removed_when="both have a CPU path.",
)
