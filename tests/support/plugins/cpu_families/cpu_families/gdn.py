"""Delta rules (Qwen3-Next, Qwen3.5, Kimi Linear) in plain PyTorch on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import conv1d, normalize, silu, softplus

from sglang_parse.patches.base import Patch, Value, around, replace


def _recur(
    qkv: tuple[torch.Tensor, ...],
    decays: torch.Tensor,
    betas: torch.Tensor,
    states: torch.Tensor,
    indices: torch.Tensor,
    starts: torch.Tensor,
) -> torch.Tensor:
    """The rule, token by token.

    Args:
        qkv: [1, tokens, key heads, K] twice, [1, tokens, heads, V].
        decays: [1, tokens, heads], or [1, tokens, heads, K]; betas: [1, tokens, heads].
        states: [slots, heads, V, K], of which ``indices`` are updated in place.
        starts: [requests + 1] each request's first token.

    Returns:
        [1, tokens, heads, V].
    """
    query, key, value = (rows[0].float() for rows in qkv)
    copies = value.shape[1] // key.shape[1]
    query, key = (normalize(rows, dim=-1).repeat_interleave(copies, 1) for rows in (query, key))
    query, betas = query * key.shape[-1] ** -0.5, betas[0]
    decays = decays.exp().reshape(*betas.shape, 1, -1)
    out = torch.empty_like(value)
    bounds = starts.tolist()
    for slot, start, end in zip(indices.tolist(), bounds, bounds[1:], strict=False):
        state = states[slot].float()
        for i in range(start, end):
            state = state * decays[i]
            seen = (state @ key[i, :, :, None])[..., 0]
            change = (value[i] - seen) * betas[i, :, None]
            state = state + change[:, :, None] * key[i, :, None, :]
            out[i] = (state @ query[i, :, :, None])[..., 0]
        states[slot] = state.to(states.dtype)
    return out[None].to(qkv[2].dtype)


def extend(
    _self: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None, None]:
    return _recur((q, k, v), g, beta, ssm_states, cache_indices, query_start_loc), None, None


def decode(
    _self: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    A_log: torch.Tensor,  # noqa: N803 - SGLang's name
    dt_bias: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    gates = fused_gdn_gating(A_log, a, b, dt_bias)
    return _recur((q, k, v), *gates, ssm_states, cache_indices, query_start_loc)


def fused_gdn_gating(
    A_log: torch.Tensor,  # noqa: N803 - SGLang's name
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [1, tokens, heads] each: the logarithms of decays, and the weights of updates."""
    decays = -A_log.float().exp() * softplus(a.float() + dt_bias.float())
    return decays[None], b.float().sigmoid()[None]


def kimi_rule(
    _self: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    _gates: torch.Tensor,
    _weights: torch.Tensor,
    *,
    A_log: torch.Tensor,  # noqa: N803 - SGLang's name
    dt_bias: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Kimi's rule, with a decay per column: prefills and decode steps alike."""
    shape = k.shape[1:]
    steps = softplus((_gates.reshape(shape) + dt_bias.reshape(shape[1:])).float())
    decays, betas = -A_log.float().exp().reshape(-1, 1) * steps, _weights.reshape(1, *shape[:2])
    gates = decays[None], betas.float().sigmoid()
    return _recur((q, k, v), *gates, ssm_states, cache_indices, query_start_loc)


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    activation: str | None = "silu",
    **_: Any,
) -> torch.Tensor:
    """x [channels, tokens] of all requests; ``conv_states`` [slots, channels, width - 1] are
    updated in place."""
    out, (channels, width), bounds = torch.empty_like(x), weight.shape, query_start_loc.tolist()
    for i, slot in enumerate(cache_indices.tolist()):
        rows = slice(bounds[i], bounds[i + 1])
        before = conv_states[slot].to(x.dtype) * has_initial_state[i]
        padded = torch.cat([before, x[:, rows]], dim=1)
        made = conv1d(padded[None], weight[:, None], bias, groups=channels)[0]
        out[:, rows] = silu(made) if activation else made
        conv_states[slot] = padded[:, 1 - width :].to(conv_states.dtype)
    return out


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """x [requests, channels], a token each."""
    starts, seen = torch.arange(len(x) + 1), torch.ones(len(x), dtype=torch.bool)
    where = {"query_start_loc": starts, "cache_indices": conv_state_indices}
    where |= {"conv_states": conv_state, "has_initial_state": seen}
    return causal_conv1d_fn(x.t(), weight, bias, activation=activation, **where).t()


def _norm(self: Any, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    rows, gate = x.float(), z.float()
    rows = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.float()
    gate = gate.sigmoid() if getattr(self, "activation", "") == "sigmoid" else silu(gate)
    return (rows * gate).to(x.dtype)


def _norm_gated(self: Any, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return _norm(self, x, g)


def _gate_shared(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    output: torch.Tensor,
    *,
    do_add: bool,
) -> None:
    gated = torch.sigmoid(hidden_states @ gate_weight[:, None]) * shared_output
    output.copy_(output + gated if do_add else gated)


def fused_sigmoid_mul(
    attn_output: torch.Tensor,
    gate: torch.Tensor,
    inplace: bool = False,  # noqa: ARG001, FBT001, FBT002 - the result is what SGLang uses
) -> torch.Tensor:
    return attn_output * torch.sigmoid(gate.reshape(attn_output.shape))


def _of_this_machine(original: Callable, device: Any = None) -> Any:
    return torch.cpu if device is None else original(device)


_KERNELS, _FLA = "sglang.kernels.ops", "sglang.kernels.ops.attention.fla"
_GDN = "sglang.srt.layers.attention.linear.kernels.gdn_triton.TritonGDNKernel"
_KDA = "sglang.srt.layers.attention.linear.kernels.kda_triton.TritonKDAKernel"
_CONV = f"{_KERNELS}.mamba.causal_conv1d_triton"
PATCH = Patch(
    "gdn",
    {
        f"{_GDN}.extend": replace(extend),
        f"{_GDN}.decode": replace(decode),
        f"{_GDN}.supports_packed_decode": Value(False),
        f"{_KDA}.extend": replace(kimi_rule),
        f"{_KDA}.decode": replace(kimi_rule),
        f"{_KDA}.supports_packed_decode": Value(False),
        f"{_KERNELS}.attention.linear.fused_gdn_gating.fused_gdn_gating": replace(fused_gdn_gating),
        f"{_CONV}.causal_conv1d_fn": replace(causal_conv1d_fn),
        f"{_CONV}.causal_conv1d_update": replace(causal_conv1d_update),
        f"{_FLA}.layernorm_gated.RMSNorm.forward": replace(_norm),
        f"{_FLA}.fused_norm_gate.FusedRMSNormGated.forward": replace(_norm_gated),
        f"{_KERNELS}.elementwise.elementwise._launch_fused_gate_sigmoid_mul": replace(_gate_shared),
        f"{_KERNELS}.elementwise.elementwise.fused_sigmoid_mul": replace(fused_sigmoid_mul),
        "torch.get_device_module": around(_of_this_machine),
    },
    why="SGLang runs the delta rules, their convolution, gates and norms in Triton kernels, or "
    "in compiled kernels for CPUs with AMX; a CPU without them has neither. Qwen3-Next's norm asks "
    "PyTorch for the module of the accelerator, which is CUDA's in a build with CUDA.",
    how="the same in plain PyTorch, token by token; the module is the CPU's. Only on machines "
    "without an accelerator.",
    removed_when="these layers have a PyTorch path.",
)
