"""Flags of ``sglang-parse roofline``: shapes of dense decoders in bf16, and GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sglang_parse.client.flags import Flags, at_least, fraction, numbers, option
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


@dataclass(frozen=True)
class RooflineSettings(Flags):
    target: Shape = option(
        "14b", f"{', '.join(QWEN3)} (Qwen3), or a model's config.json", read=read_shape
    )
    draft: Shape = option("0.6b", "likewise", read=read_shape)
    gpu: str = option("h100", choices=[*GPUS])
    concurrencies: tuple[int, ...] = option(
        (1, 8, 16),
        "requests at a time, which start together",
        name="--concurrency",
        metavar="CONCURRENCY",
        type=numbers(at_least(1)),
    )
    acceptances: tuple[float, ...] = option(
        (0.92, 0.97, 0.99, 1.0),
        "chances that the target accepts a draft token",
        name="--acceptance",
        metavar="ACCEPTANCE",
        type=numbers(fraction),
    )
    block_acceptance: float = option(
        0.85,
        "chance that a token which a parallel draft model proposes is its own; the demo draft's",
        type=fraction,
    )
    input_len: int = option(128, "tokens", type=at_least(1))
    output_len: int = option(257, "tokens", type=at_least(8))

    def __post_init__(self) -> None:
        if not (self.concurrencies and self.acceptances):
            raise BenchError("--concurrency and --acceptance need numbers, such as 1,8")
        kv_tokens = max(self.concurrencies) * (self.input_len + self.output_len)
        shapes = (self.target, self.draft)
        numbers = sum(one.num_weights + kv_tokens * one.kv_per_token for one in shapes)
        needed = BF16_BYTES * numbers
        memory = GPUS[self.gpu][2]
        if needed > memory * 1e9:
            text = f"weights and KV take {needed / 1e9:.0f} GB and --gpu {self.gpu} has {memory}"
            raise BenchError(f"{text}; use a larger one, smaller models or fewer requests")


add_arguments = RooflineSettings.add_arguments
