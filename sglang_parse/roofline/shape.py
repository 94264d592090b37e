"""Shapes of dense decoders in bf16, and GPUs."""

from __future__ import annotations

from pathlib import Path

from sglang_parse.client.records import BenchError
from sglang_parse.limit.shape import SHAPES, Shape

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


def read_shape(name: str) -> Shape:
    """A shape of ``bench`` by its size, or a dense model's by its folder or config.json."""
    path = SHAPES / f"qwen3_{name.replace('.', '_')}" if name in QWEN3 else Path(name)
    try:
        found = Shape.of(path)
        if found.is_quantized or found.num_experts > 1:
            raise ValueError("it is quantized, or a mixture of experts")
        return found
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        fix = f"use {', '.join(QWEN3)}, or the config.json of a dense model in bf16"
        raise BenchError(f"{name!r} gives no shape ({error!r}); {fix}") from error
