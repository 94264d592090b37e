"""The likelihood's kernel, in Triton's interpreter, beside the operations that a CPU runs; these:
``test_heads``, ``test_adjust``."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import triton

from sglang_parse.engine.judge import likelihood_kernel
from sglang_parse.engine.judge.scorer import MIN_LOGPROB, next_likelihoods
from support.interpreter import assert_passes_in_interpreter

pytestmark = pytest.mark.compat

IS_INTERPRETED = triton.knobs.runtime.interpret
BLOCK = likelihood_kernel.BLOCK
in_interpreter = pytest.mark.skipif(not IS_INTERPRETED, reason="run by test_in_the_interpreter")


def both(
    monkeypatch: pytest.MonkeyPatch,
    logits: torch.Tensor,
    rows: torch.Tensor | None,
    ids: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """By the kernel, and by operations."""
    before, by_kernel = logits.clone(), next_likelihoods(logits, rows, ids)
    monkeypatch.setattr(likelihood_kernel, "serves", lambda _: False)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    return by_kernel, next_likelihoods(logits, rows, ids)


CASES = [
    (1, 2, BLOCK, torch.float32),
    (33, 1000, BLOCK, torch.bfloat16),
    (33, 1000, 256, torch.float16),
    (2064, 320, 128, torch.bfloat16),
    (3, BLOCK, BLOCK, torch.bfloat16),
    (3, BLOCK + 1, BLOCK, torch.float16),
    (2, 5 * BLOCK + 77, BLOCK, torch.float32),
]


@in_interpreter
@pytest.mark.parametrize(("num_rows", "vocab", "block", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("selects", [False, True], ids=["all rows", "some"])
def test_the_kernel(
    num_rows: int,
    vocab: int,
    block: int,
    dtype: torch.dtype,
    selects: bool,
    monkeypatch: pytest.MonkeyPatch,
):
    """Peaks early and late; rows of a wider buffer, whose strides no block divides."""
    monkeypatch.setattr(likelihood_kernel, "BLOCK", block)
    generator = torch.Generator().manual_seed(num_rows)
    slope = torch.linspace(-20, 20, vocab + 3)
    slopes = torch.stack((slope, -slope)).repeat(num_rows + 5, 1)[: num_rows + 5]
    logits = torch.randn(slopes.shape, generator=generator) * 4 + slopes
    logits = logits.to(dtype)[:, :vocab]
    rows = torch.randperm(num_rows + 5, generator=generator)[:num_rows] if selects else None
    logits = logits if selects else logits[:num_rows]
    ids = torch.randint(vocab, (num_rows,), generator=generator)
    by_kernel, expected = both(monkeypatch, logits, rows, ids)
    assert by_kernel.dtype == torch.float32
    torch.testing.assert_close(by_kernel, expected, rtol=1e-5, atol=2e-5)


@in_interpreter
def test_logits_that_are_no_usual_numbers(monkeypatch: pytest.MonkeyPatch):
    """Masked by -inf or the lowest number, whole blocks of them, too; no likelihood is NaN."""
    lowest, vocab = torch.finfo(torch.float32).min, 2 * BLOCK + 9
    logits = torch.randn(9, vocab)
    logits[0, :BLOCK] = logits[1, BLOCK:] = logits[2] = -math.inf
    logits[3, 5] = math.inf
    logits[4, -1] = math.nan
    logits[5, :BLOCK] = logits[6, 1:] = lowest
    logits[7] = -math.inf
    logits[7, 4] = 3.0
    logits[8] = lowest
    by_kernel, expected = both(monkeypatch, logits, None, torch.full((9,), 4))
    assert by_kernel.isfinite().all()
    torch.testing.assert_close(by_kernel, expected, rtol=1e-5, atol=2e-5)
    assert by_kernel[[0, 2, 3, 4, 5, 6], 0].tolist() == [MIN_LOGPROB] * 6
    assert by_kernel[7].tolist() == [0.0, 0.0]


@pytest.mark.nightly("tests/compat/test_heads.py::test_likelihoods_in_pieces")
@pytest.mark.skipif(IS_INTERPRETED, reason="is the interpreter")
def test_in_the_interpreter():
    assert_passes_in_interpreter(Path(__file__))
