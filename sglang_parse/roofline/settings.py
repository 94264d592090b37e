"""Flags of ``sglang-parse roofline``: shapes of decoders in bf16 or FP8, and GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_parse.client.flags import Flags, at_least, fraction, numbers, option
from sglang_parse.client.records import BenchError
from sglang_parse.shapes.shape import Shape, shape_names

GPUS = {
    "h100": (3.35, 989, 80),
    "h200": (4.8, 989, 141),
    "b200": (7.7, 2250, 180),
    "a100": (2.04, 312, 80),
    "l40s": (0.864, 362, 48),
    "rtx4090": (1.008, 165, 24),
}
"""TB/s, TFLOP/s in bf16 without sparsity, GB of memory: the makers' data sheets."""
BF16_BYTES, MAX_HEAD_STEPS = 2, 16


@dataclass(frozen=True)
class RooflineSettings(Flags):
    target: Shape = option("14b", f"{', '.join(shape_names())}, or a config.json", read=Shape.read)
    draft: Shape = option("0.6b", "likewise", read=Shape.read)
    gpu: str = option("h100", choices=[*GPUS])
    tp_size: int = option(1, "GPUs that both models are spread over", type=at_least(1))
    concurrencies: tuple[int, ...] = option(
        (1, 8, 16),
        "requests at a time, which start together",
        name="--concurrency",
        type=numbers(at_least(1)),
    )
    acceptances: tuple[float, ...] = option(
        (0.92, 0.97, 0.99, 1.0),
        "chances that the target accepts a draft token",
        name="--acceptance",
        type=numbers(fraction),
    )
    block_acceptance: float = option(
        0.85,
        "chance that a token which a parallel draft model proposes is its own; the demo draft's",
        type=fraction,
    )
    head_steps: int = option(3, "tokens that an EAGLE-3 head proposes, 1 to 16", type=at_least(1))
    accept_length: float = option(
        3.0, "tokens per forward of a model with an EAGLE-3 head, 1 to --head-steps + 1", type=float
    )
    input_len: int = option(128, "tokens", type=at_least(1))
    output_len: int = option(257, "tokens", type=at_least(8))

    def __post_init__(self) -> None:
        if not (self.concurrencies and self.acceptances):
            raise BenchError("--concurrency and --acceptance need numbers, such as 1,8")
        if self.head_steps > MAX_HEAD_STEPS:
            raise BenchError(f"--head-steps is {self.head_steps}; use 1 to {MAX_HEAD_STEPS}")
        if not 1 <= self.accept_length <= 1 + self.head_steps:
            text = f"--accept-length is {self.accept_length:g}; use 1 to {1 + self.head_steps}"
            raise BenchError(f"{text}, or more --head-steps")
        kv_tokens = max(self.concurrencies) * (self.input_len + self.output_len)
        needed = sum(one.num_bytes(BF16_BYTES, kv_tokens) for one in (self.target, self.draft))
        memory = self.tp_size * GPUS[self.gpu][2]
        if needed > memory * 1e9:
            text = f"weights and KV take {needed / 1e9:.0f} GB and --gpu {self.gpu} has {memory}"
            raise BenchError(f"{text}; use a larger one, --tp-size, or fewer requests")


add_arguments = RooflineSettings.add_arguments
