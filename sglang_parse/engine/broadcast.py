"""One decision for all tensor-parallel ranks.

Ranks hold the same logits only up to rounding. If each decided for itself, two could accept
different lengths, launch forwards of different shapes and deadlock. So rank 0's tokens and verdicts
count on every rank. Every rank still computes its own, because SGLang's sampler may synchronize.

Source: the broadcasts of ``sglang.srt.speculative.eagle_utils.eagle_sample``.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from sglang.srt.runtime_context import get_parallel

T = TypeVar("T")


def is_first_rank() -> bool:
    """Whether this is rank 0, whose decisions count."""
    return get_parallel().tp_group.rank_in_group == 0


def broadcast(values: torch.Tensor) -> torch.Tensor:
    """Rank 0's ``values``; without communication on one rank.

    Args:
        values: same shape, dtype and device kind on every rank; may be overwritten.
    """
    return get_parallel().tp_group.broadcast(values.contiguous(), src=0)


def broadcast_object(value: T) -> T:
    """Rank 0's ``value``, pickled; for host values."""
    return get_parallel().tp_group.broadcast_object(value, src=0)
