"""Flags of ``sglang-parse roofline``."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_parse.client.flags import Flags, at_least, fraction, numbers, option
from sglang_parse.client.records import BenchError
from sglang_parse.limit.shape import Shape
from sglang_parse.roofline.shape import BF16_BYTES, GPUS, QWEN3, read_shape


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
