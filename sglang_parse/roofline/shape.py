"""Shapes of dense decoders in bf16, and GPUs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sglang_parse.client.records import BenchError
from sglang_parse.limit.shape import SHAPES

GPUS = {
    "h100": (3.35, 989, 80),
    "h200": (4.8, 989, 141),
    "b200": (7.7, 2250, 180),
    "a100": (2.04, 312, 80),
    "l40s": (0.864, 362, 48),
    "rtx4090": (1.008, 165, 24),
}
"""TB/s, TFLOP/s in bf16 without sparsity, GB of memory: the makers' data sheets."""
QWEN3 = ("0.6b", "1.7b", "4b", "8b", "14b", "32b")
BF16_BYTES = 2
NOT_DENSE = ("quantization_config", "num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder with grouped-query attention and gated MLPs; fields as in config.json."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool

    @classmethod
    def read(cls, name: str) -> Self:
        """A shape by its name, or a model's by its folder or config.json."""
        path = SHAPES / f"qwen3_{name.replace('.', '_')}" if name in QWEN3 else Path(name)
        try:
            config = json.loads(
                (path / "config.json" if path.is_dir() else path).read_text("utf-8")
            )
            if other := [key for key in NOT_DENSE if config.get(key)]:
                raise ValueError(f"{other[0]} is set")
            heads = config["num_attention_heads"]
            return cls(
                num_hidden_layers=config["num_hidden_layers"],
                hidden_size=config["hidden_size"],
                intermediate_size=config["intermediate_size"],
                num_attention_heads=heads,
                num_key_value_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or config["hidden_size"] // heads,
                vocab_size=config["vocab_size"],
                tie_word_embeddings=bool(config.get("tie_word_embeddings")),
            )
        except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
            fix = f"use {', '.join(QWEN3)}, or the config.json of a dense model in bf16"
            raise BenchError(f"{name!r} gives no shape ({error!r}); {fix}") from error

    @property
    def body(self) -> int:
        heads = 2 * (self.num_attention_heads + self.num_key_value_heads)
        of_layer = self.hidden_size * (heads * self.head_dim + 3 * self.intermediate_size)
        return self.num_hidden_layers * of_layer

    @property
    def lm_head(self) -> int:
        return self.hidden_size * self.vocab_size

    @property
    def memory(self) -> int:
        return BF16_BYTES * (self.body + self.lm_head * (1 if self.tie_word_embeddings else 2))

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token's KV."""
        return 2 * BF16_BYTES * self.num_hidden_layers * self.num_key_value_heads * self.head_dim
