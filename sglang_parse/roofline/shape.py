"""Shapes of decoders in bf16 or FP8, and GPUs."""

from __future__ import annotations

import re
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
QWEN3 = ("0.6b", "1.7b", "4b", "8b", "14b", "32b", "235b-a22b-fp8")
BF16_BYTES = 2


def read_shape(name: str) -> Shape:
    """A shape of ``bench`` by its size, or a model's by its folder or config.json."""
    path = SHAPES / f"qwen3_{re.sub('[.-]', '_', name)}" if name in QWEN3 else Path(name)
    try:
        return Shape.of(path)
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        fix = f"use {', '.join(QWEN3)}, or a decoder's config.json"
        raise BenchError(f"{name!r} gives no shape ({error!r}); {fix}") from error
