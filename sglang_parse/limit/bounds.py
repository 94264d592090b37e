"""How fast a stage could be at best: its bytes and its arithmetic against what the card can do.

With B bytes to move and F floating point operations to do, no stage is faster than
max(B / bandwidth, F / rate): bound by memory where the first is larger, by arithmetic else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_parse.core.layout import RequestLayout
from sglang_parse.limit.shape import Shape

if TYPE_CHECKING:
    import torch

COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
MATRIX_SIZE = {"cuda": 8192, "cpu": 1024}
MIN_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class Card:
    """What a device was measured to do: bytes and floating point operations per second."""

    bandwidth: float
    rate: float


@dataclass(frozen=True, slots=True)
class Work:
    """What one run of a stage has to do."""

    bytes: float
    flops: float


@dataclass(frozen=True, slots=True)
class Bound:
    """A stage against the card.

    Attributes:
        stage: a draft step, a decode step or a verification pass.
        concurrency: requests at a time.
        by: "memory" or "arithmetic", whichever takes longer.
        floor_ms: the time no run can go below.
        measured_ms: the time it took.
        share: the floor / the measured time.
    """

    stage: str
    concurrency: int
    by: str
    floor_ms: float
    measured_ms: float
    share: float


def step_work(shape: Shape, num_requests: int, context_len: float, item_bytes: int) -> Work:
    """One decode step.

    Args:
        context_len: mean tokens of a request's sequence.
        item_bytes: of a weight and of a number in the KV cache.
    """
    weights = shape.weights_bytes(item_bytes, num_requests)
    kv = shape.kv_per_token * context_len * num_requests
    pairs = context_len * num_requests
    flops = 2 * (shape.token_weights + shape.head_weights) * num_requests
    return Work(bytes=weights + item_bytes * kv, flops=flops + _attention_flops(shape, pairs))


def pass_work(
    shape: Shape, layout: RequestLayout, num_requests: int, num_logits: int, item_bytes: int
) -> Work:
    """One verification pass over ``num_requests`` requests of the same layout.

    Args:
        num_logits: rows of each request whose logits are computed.
    """
    rows = num_requests * layout.num_rows
    pairs = num_requests * attended_pairs(layout)
    flops = 2 * (shape.token_weights * rows + shape.head_weights * num_logits * num_requests)
    kv = shape.kv_per_token * layout.kv_len * num_requests
    weights = shape.weights_bytes(item_bytes, rows)
    return Work(bytes=weights + item_bytes * kv, flops=flops + _attention_flops(shape, pairs))


def attended_pairs(layout: RequestLayout) -> int:
    """Ones in the request's mask."""
    return sum(
        rows.num_rows * rows.context_len + rows.num_rows * (rows.num_rows + 1) // 2
        for rows in layout.pseudo_sequences()
    )


def _attention_flops(shape: Shape, pairs: float) -> float:
    """Scores and weighted values, for every head."""
    return 4 * shape.layers * shape.heads * shape.head_dim * pairs


def bound(stage: str, concurrency: int, work: Work, card: Card, measured_ms: float) -> Bound:
    """Where a stage stands."""
    memory_ms, arithmetic_ms = 1e3 * work.bytes / card.bandwidth, 1e3 * work.flops / card.rate
    floor_ms = max(memory_ms, arithmetic_ms)
    by = "memory" if memory_ms >= arithmetic_ms else "arithmetic"
    return Bound(stage, concurrency, by, floor_ms, measured_ms, floor_ms / measured_ms)


def measure_card(device: str, dtype: torch.dtype) -> Card:
    """Copy bandwidth (bytes read and written) and the rate of a square matrix product."""
    import torch

    source = torch.empty(COPY_BYTES[device], dtype=torch.uint8, device=device)
    copied = torch.empty_like(source)
    size = MATRIX_SIZE[device]
    matrix = torch.randn(size, size, device=device).to(dtype)
    copy_s = median_seconds("copied.copy_(source)", {"copied": copied, "source": source})
    product_s = median_seconds("matrix @ matrix", {"matrix": matrix})
    return Card(bandwidth=2 * source.numel() / copy_s, rate=2 * size**3 / product_s)


def median_seconds(statement: str, names: dict[str, object]) -> float:
    """Time of a statement on its device, warmed up and waited for."""
    from torch.utils.benchmark import Timer

    return Timer(statement, globals=names).blocked_autorange(min_run_time=MIN_SECONDS).median


def mask_build_ms(layouts: Sequence[RequestLayout], device: str) -> float:
    """Time to build the mask of one pass on its device."""
    from sglang_parse.core.layout import VerifyLayout
    from sglang_parse.core.mask import flat_mask

    names = {"flat_mask": flat_mask, "layout": VerifyLayout.of(layouts), "device": device}
    return 1e3 * median_seconds("flat_mask(layout, device)", names)


def mask_pack_ms(layouts: Sequence[RequestLayout], device: str) -> float:
    """Time to pack that mask to bits, as FlashInfer's plan does it: request by request."""
    import torch
    from flashinfer.quantization import segment_packbits

    from sglang_parse.core.layout import VerifyLayout
    from sglang_parse.core.mask import flat_mask

    layout = VerifyLayout.of(layouts)
    indptr = torch.tensor(layout.mask_indptr, dtype=torch.int32, device=device)
    names = {"pack": segment_packbits, "mask": flat_mask(layout, device), "indptr": indptr}
    return 1e3 * median_seconds('pack(mask, indptr, bitorder="little")', names)
