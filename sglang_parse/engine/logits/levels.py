"""How sure a model is of tokens that it chose."""

from __future__ import annotations

import math

import torch

from sglang_parse.core.doubt import LEVELS, LOWEST


def levels_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """int64 [n] levels (``core.doubt``) of tokens; of no meaning where logits hold a NaN.

    Args:
        logits: [n, vocab] as adjusted, before any temperature.
        tokens: int64 [n]; below 0 for none.
    """
    chosen = tokens.clamp(min=0)[:, None]
    chances = logits.softmax(-1, dtype=torch.float32).gather(1, chosen)[:, 0]
    octaves = chances.logit() / math.log(2)
    return (octaves - LOWEST).floor().clamp(0, LEVELS - 1).to(torch.int64)
