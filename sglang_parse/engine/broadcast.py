"""One decision for all tensor-parallel ranks.

Ranks hold the same logits only up to rounding. Had each decided for itself, two could cut a draft
at different places, run forwards of different shapes and wait for each other for ever. So whatever
follows from logits (draft tokens, verdicts, the target's own tokens, NaN faults) is read on every
rank, because SGLang's sampler may itself synchronise them, and rank 0's reading counts on all.

Source: the broadcasts of ``sglang.srt.speculative.eagle_utils.eagle_sample``.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from sglang.srt.runtime_context import get_parallel

from sglang_parse.core.block import NO_TOKEN

T = TypeVar("T")


def share(values: torch.Tensor) -> torch.Tensor:
    """Rank 0's ``values``. One broadcast, none when there is one rank.

    Args:
        values: same shape, dtype and device kind on every rank; may be overwritten.
    """
    return get_parallel().tp_group.broadcast(values.contiguous(), src=0)


def broadcast_tokens(tokens: torch.Tensor, is_bad: torch.Tensor) -> torch.Tensor:
    """Rank 0's choice per row, ``NO_TOKEN`` where its logits held a NaN: int64 [n], on the device.

    Args:
        tokens: integers [n], this rank's choices.
        is_bad: bool [n], whether the row's logits held a NaN on this rank.
    """
    return share(tokens.to(torch.int64).masked_fill(is_bad, NO_TOKEN))


def broadcast_object(value: T) -> T:
    """Rank 0's ``value``, anything that can be pickled: for what is not on the device anyway."""
    return get_parallel().tp_group.broadcast_object(value, src=0)
