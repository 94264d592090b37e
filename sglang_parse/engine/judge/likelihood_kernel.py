"""The likelihood of draft tokens as one kernel, which reads each row of logits once."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 8192, 16
"""Logits of a row at a time. Not measured."""
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""Before the first logit: finite, because a row may begin with -inf."""


def serves(logits: torch.Tensor) -> bool:
    """Whether the kernel runs there: on a GPU, or in Triton's interpreter."""
    return logits.is_cuda or triton.knobs.runtime.interpret


def write_likelihoods(
    found: torch.Tensor,
    logits: torch.Tensor,
    rows: torch.Tensor | None,
    ids: torch.Tensor,
    least: float,
) -> None:
    """Writes ``found``, fp32 [len(ids), 2], as ``scorer.next_likelihoods`` returns it.

    Args:
        logits: [n, vocab], each row's side by side.
        rows: int64 indices into ``logits``; None for the first ones.
        ids: int64 the tokens that follow.
        least: stands for what is below it, and for NaN.
    """
    _likelihoods[(len(ids),)](
        found, logits, logits.stride(0), rows, ids, logits.shape[1], least, BLOCK, num_warps=WARPS
    )


@triton.jit
def _likelihoods(found, logits, stride, rows, ids, vocab, least, BLOCK: tl.constexpr):
    """Of one row, by a running softmax: ``total`` sums exp(logit - peak), ``moment`` these times
    logit - peak."""
    at, place = tl.program_id(0), tl.arange(0, BLOCK)
    row = at.to(tl.int64) if rows is None else tl.load(rows + at)
    logits += row * stride
    peak, total, moment = tl.full([], LOWEST, tl.float32), 0.0, 0.0
    for start in range(0, vocab, BLOCK):
        is_token = start + place < vocab
        values = tl.load(logits + start + place, mask=is_token, other=float("-inf")).to(tl.float32)
        new_peak = tl.maximum(peak, tl.max(values, 0))
        weights, decay = tl.exp(values - new_peak), tl.exp(peak - new_peak)
        # 0 times an infinite distance would be NaN.
        moments = tl.where(weights > 0, weights * (values - new_peak), 0.0)
        moment = tl.where(decay > 0, decay * (moment + total * (peak - new_peak)), 0.0)
        moment += tl.sum(moments, 0)
        total = total * decay + tl.sum(weights, 0)
        peak = new_peak
    logprob = tl.load(logits + tl.load(ids + at)).to(tl.float32) - peak - tl.log(total)
    entropy = tl.log(total) - moment / total
    tl.store(found + 2 * at, tl.where(logprob > least, logprob, least))
    tl.store(found + 2 * at + 1, tl.where(entropy > least, entropy, least))
