"""Mamba layers (Granite 4, Falcon-H1, Nemotron-H) in plain PyTorch on a CPU."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import softplus

from cpu_families import gdn
from sglang_parse.patches.base import Patch, Registration, replace


def _scan(
    rows: tuple[torch.Tensor, ...],
    rates: torch.Tensor,
    skips: torch.Tensor,
    states: torch.Tensor,
    bounds: Sequence[int],
) -> torch.Tensor:
    """The recurrence, token by token.

    Args:
        rows: [tokens, heads, width] inputs, [tokens, heads] steps, [tokens, groups, size] twice.
        rates, skips: [heads].
        states: [requests, heads, width, size], updated in place.
        bounds: [requests + 1] each request's first token.

    Returns:
        [tokens, heads, width].
    """
    x, steps, keys, queries = (row.float() for row in rows)
    copies = x.shape[1] // keys.shape[1]
    keys, queries = (part.repeat_interleave(copies, 1) for part in (keys, queries))
    decays, added, out = (steps * rates).exp(), x * steps[..., None], torch.empty_like(x)
    for request in range(len(bounds) - 1):
        state = states[request].float()
        for i in range(bounds[request], bounds[request + 1]):
            state = state * decays[i, :, None, None] + added[i, :, :, None] * keys[i, :, None]
            out[i] = (state @ queries[i, :, :, None])[..., 0] + skips[:, None] * x[i]
        states[request] = state.to(states.dtype)
    return out


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803 - SGLang's names
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    *,
    D: torch.Tensor,  # noqa: N803
    dt_bias: torch.Tensor,
    cu_seqlens: torch.Tensor,
    out: torch.Tensor,
    initial_states: torch.Tensor | None = None,
    state_dtype: torch.dtype = torch.float32,
    **_: Any,
) -> tuple[None, torch.Tensor, None]:
    """As SGLang's, of which it returns the states of ``return_varlen_states``."""
    shape = (len(cu_seqlens) - 1, *x.shape[2:], B.shape[-1])
    states = torch.zeros(shape, dtype=state_dtype)
    if initial_states is not None:
        states.copy_(initial_states)
    steps = softplus(dt[0].float() + dt_bias)
    rows = x[0], steps, B[0], C[0]
    out[0] = _scan(rows, A.float(), D.float(), states, cu_seqlens.tolist())
    return None, states, None


def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803 - SGLang's names
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    D: torch.Tensor,  # noqa: N803
    *,
    dt_bias: torch.Tensor,
    state_batch_indices: torch.Tensor,
    out: torch.Tensor,
    **_: Any,
) -> None:
    """One token per request; rates, steps and skips are the same for all of a head's width."""
    slots = state_batch_indices.to(torch.int64)
    states, steps = state[slots], softplus(dt[..., 0].float() + dt_bias[:, 0])
    rows = x, steps, B, C
    out[:] = _scan(rows, A[:, 0, 0], D[:, 0].float(), states, range(len(x) + 1))
    state[slots] = states


_MIXER = "sglang.srt.layers.attention.mamba.mamba"
_CONVOLUTIONS = {
    f"causal_conv1d_{name}{ending}": getattr(gdn, f"causal_conv1d_{name}")
    for name in ("fn", "update")
    for ending in ("", "_triton")
}


def _put() -> None:
    vars(pkgutil.resolve_name(_MIXER)).update(_CONVOLUTIONS)


def _is_put() -> bool:
    return vars(pkgutil.resolve_name(_MIXER)).items() >= _CONVOLUTIONS.items()


_OPS = "sglang.kernels.ops.mamba.triton_ops"
PATCH = Patch(
    "mamba",
    {
        f"{_OPS}.mamba_chunk_scan_combined": replace(mamba_chunk_scan_combined),
        f"{_OPS}.selective_state_update": replace(selective_state_update),
        f"{_MIXER}.MambaMixer2": Registration(_put, _is_put),
    },
    why="SGLang runs the recurrence of Mamba layers in Triton kernels, and its mixer has "
    "convolutions on GPUs, NPUs and XPUs only.",
    how="the recurrence in plain PyTorch, token by token, and the convolution of gdn.",
    removed_when="these layers have a PyTorch path.",
)
