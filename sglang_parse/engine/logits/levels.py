"""How sure a model is of tokens that it chose."""

from __future__ import annotations

import math

import torch

from sglang_parse.core.doubt import LEVELS, LOWEST

SUREST = -1e-6
"""Greatest log-probability that is told from 0 in float32."""


def levels_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """int64 [n] levels (``core.doubt``) of tokens; the lowest where logits hold a NaN.

    Args:
        logits: [n, vocab] as adjusted, before any temperature.
        tokens: int64 [n]; below 0 for none.
    """
    chosen = logits.gather(1, tokens.clamp(min=0)[:, None])[:, 0].float()
    logprobs = (chosen - logits.float().logsumexp(-1)).clamp(max=SUREST)
    octaves = (logprobs - torch.log(-torch.expm1(logprobs))) / math.log(2)
    levels = octaves.floor().nan_to_num(nan=LOWEST, neginf=LOWEST) - LOWEST
    return levels.clamp(0, LEVELS - 1).to(torch.int64)
