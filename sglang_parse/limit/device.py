"""The device: its memory, its speed, and the lower bound of a stage's time (its roofline).

A stage that moves B bytes and performs F floating point operations takes at least
max(B / bandwidth, F / rate): it is bound by memory or by arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from sglang_parse.client.servers import Server
from sglang_parse.core.layout import RequestLayout
from sglang_parse.limit.shape import Shape

if TYPE_CHECKING:
    import torch

COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
MATRIX_SIZE = {"cuda": 8192, "cpu": 1024}
MIN_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class Card:
    """The measured speed of a device, in bytes and floating point operations per second."""

    bandwidth: float
    rate: float


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes to move and floating point operations of one forward."""

    bytes: float
    flops: float


@dataclass(frozen=True, slots=True)
class Bound:
    """The measured time of a stage and its lower bound.

    Attributes:
        stage: draft step, decode step or target verify.
        concurrency: requests at a time.
        by: "memory" or "arithmetic", whichever takes longer.
        floor_ms: the lower bound.
        measured_ms: the measured time.
        fraction: the lower bound / the measured time.
    """

    stage: str
    concurrency: int
    by: str
    floor_ms: float
    measured_ms: float
    fraction: float


def step_work(shape: Shape, num_requests: int, context_len: float, item_bytes: int) -> Work:
    """Returns the work of one decode step.

    Args:
        context_len: mean length of a request's sequence, in tokens.
        item_bytes: size of a weight and of a number in the KV cache.
    """
    pairs = context_len * num_requests
    flops = 2 * (shape.token_weights + shape.head_weights) * num_requests
    return Work(
        shape.weights_bytes(item_bytes, num_requests) + item_bytes * shape.kv_per_token * pairs,
        flops + _attention_flops(shape, pairs),
    )


def verify_work(
    shape: Shape, layout: RequestLayout, num_requests: int, num_logits: int, item_bytes: int
) -> Work:
    """Returns the work of one forward over ``num_requests`` requests of the same layout.

    Args:
        num_logits: rows of each request with logits.
    """
    rows = num_requests * layout.num_rows
    flops = 2 * (shape.token_weights * rows + shape.head_weights * num_logits * num_requests)
    kv = shape.kv_per_token * layout.kv_len * num_requests
    return Work(
        shape.weights_bytes(item_bytes, rows) + item_bytes * kv,
        flops + _attention_flops(shape, num_requests * attended_pairs(layout)),
    )


def attended_pairs(layout: RequestLayout) -> int:
    """Returns the number of ones in the request's mask."""
    return sum(
        rows.num_rows * rows.context_len + rows.num_rows * (rows.num_rows + 1) // 2
        for rows in layout.pseudo_sequences()
    )


def _attention_flops(shape: Shape, pairs: float) -> float:
    """Scores and weighted values, for every head."""
    return 4 * shape.layers * shape.heads * shape.head_dim * pairs


def bound(stage: str, concurrency: int, work: Work, card: Card, measured_ms: float) -> Bound:
    """Compares a stage's measured time with its lower bound."""
    memory_ms, arithmetic_ms = 1e3 * work.bytes / card.bandwidth, 1e3 * work.flops / card.rate
    floor_ms = max(memory_ms, arithmetic_ms)
    by = "memory" if memory_ms >= arithmetic_ms else "arithmetic"
    return Bound(stage, concurrency, by, floor_ms, measured_ms, floor_ms / measured_ms)


def measure_card(device: str, dtype: torch.dtype) -> Card:
    """Measures copy bandwidth (bytes read and written) and the rate of a square matrix product."""
    import torch
    from torch.utils.benchmark import Timer

    size = MATRIX_SIZE[device]
    matrix = torch.randn(size, size, device=device).to(dtype)
    source = torch.empty(COPY_BYTES[device], dtype=torch.uint8, device=device)
    names = {"source": source, "copied": torch.empty_like(source), "matrix": matrix}
    copy_s, product_s = (
        Timer(statement, globals=names).blocked_autorange(min_run_time=MIN_SECONDS).median
        for statement in ("copied.copy_(source)", "matrix @ matrix")
    )
    return Card(bandwidth=2 * source.numel() / copy_s, rate=2 * size**3 / product_s)


def total_bytes(device: str) -> int:
    """Memory of all devices of that kind."""
    if device == "cpu":
        return psutil.virtual_memory().total
    return sum(total for _, total in _gpu_memory())


def used_bytes(device: str, server: Server | None = None) -> int:
    """Memory in use: of all GPUs, or of a server's processes on a CPU.

    SGLang's allocator keeps the GPU memory it once took, so the end of a run shows the peak. The
    resident sets on a CPU count shared pages more than once.
    """
    if device != "cpu":
        return sum(total - free for free, total in _gpu_memory())
    if server is None:
        return 0
    first = psutil.Process(server.pid)
    return sum(p.memory_info().rss for p in (first, *first.children(recursive=True)))


def _gpu_memory() -> list[tuple[int, int]]:
    import torch

    return [torch.cuda.mem_get_info(index) for index in range(torch.cuda.device_count())]
