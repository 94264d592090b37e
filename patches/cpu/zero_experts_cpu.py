"""LongCat's experts that return their input on a CPU (ledger: zero_experts_cpu)."""

from __future__ import annotations

from typing import Any

import torch

from sglang_parse.patches.base import Patch, on_cpu_only, replace


def zero_experts_compute_triton(
    expert_indices: torch.Tensor,
    expert_scales: torch.Tensor,
    num_experts: int,
    hidden_states: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Returns what they add; routing to them becomes routing to the first expert with weight 0.

    Args:
        expert_indices, expert_scales: [tokens, top_k], changed in place.
        num_experts: how many compute something; the others have higher indices.
        hidden_states: [tokens, hidden].
    """
    is_zero = expert_indices >= num_experts
    added = hidden_states * (expert_scales * is_zero).sum(-1, keepdim=True)
    expert_indices[is_zero], expert_scales[is_zero] = 0, 0.0
    return added.to(hidden_states.dtype)


PATCH = Patch(
    "zero_experts_cpu",
    {
        "sglang.kernels.ops.moe.ep_moe_kernels.zero_experts_compute_triton": replace(
            zero_experts_compute_triton
        )
    },
    why="SGLang runs the experts of LongCat that return their input in a Triton kernel.",
    how="the same in plain PyTorch. Only on machines without an accelerator.",
    removed_when="they have a PyTorch path.",
    is_needed=on_cpu_only,
)
