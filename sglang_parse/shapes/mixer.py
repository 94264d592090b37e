"""What a decoder's layers mix tokens with, from its config.json: bytes read for it decide what a
forward takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STATE_BYTES = 4
"""Of a number in the state of linear attention, which SGLang keeps in fp32."""


@dataclass(frozen=True, slots=True)
class Mixer:
    """In the mean over the layers.

    Attributes:
        weights: of a layer.
        kv: numbers in a layer's keys and values of one token.
        state_bytes: of a layer, for each request: linear attention's.
        is_latent: whether each GPU keeps all of the KV.
    """

    weights: float
    kv: float
    state_bytes: float = 0.0
    is_latent: bool = False


def mixer_of(config: Mapping[str, Any]) -> Mixer:
    """Of latent attention (DeepSeek V2's), gated delta nets beside full attention (Qwen3-Next's),
    or grouped queries."""
    if config.get("kv_lora_rank"):
        return latent(config)
    return hybrid(config) if config.get("linear_num_value_heads") else grouped_query(config)


def grouped_query(config: Mapping[str, Any], *, has_gate: bool = False) -> Mixer:
    """``has_gate``: of the output, as wide as the queries."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    return Mixer(
        hidden * head_dim * ((2 + has_gate) * heads + 2 * kv_heads), 2 * kv_heads * head_dim
    )


def latent(config: Mapping[str, Any]) -> Mixer:
    hidden, heads, rank = (
        config[key] for key in ("hidden_size", "num_attention_heads", "kv_lora_rank")
    )
    nope, rope, values = (
        config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    queries, q_rank = heads * (nope + rope), config.get("q_lora_rank")
    of_queries = q_rank * (hidden + queries) if q_rank else hidden * queries
    of_kv = hidden * (rank + rope) + rank * heads * (nope + values)
    return Mixer(of_queries + of_kv + heads * values * hidden, rank + rope, is_latent=True)


def hybrid(config: Mapping[str, Any]) -> Mixer:
    """Every ``full_attention_interval``-th layer has full attention, with a gate."""
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    value_heads = config["linear_num_value_heads"]
    values = value_heads * config["linear_value_head_dim"]
    weights = config["hidden_size"] * (2 * keys + 3 * values + 2 * value_heads)
    state = STATE_BYTES * values * config["linear_key_head_dim"]
    full, part = grouped_query(config, has_gate=True), 1 / config["full_attention_interval"]
    mean = part * full.weights + (1 - part) * weights
    return Mixer(mean, part * full.kv, (1 - part) * state)
