"""Tile counts, the reason for the preferred attention layouts."""

from __future__ import annotations

import pytest

from sglang_parse.attention.support import choose_layout
from sglang_parse.core.layout import RequestLayout, VerifyLayout
from support.tiles import KERNELS, flashinfer

pytestmark = pytest.mark.unit


def pass_of(context: int, draft: int, questions: int, question_len: int) -> VerifyLayout:
    visible_lens = tuple(1 + draft * (i + 1) // questions for i in range(questions))
    lens = (question_len,) * questions
    return VerifyLayout.of([RequestLayout(context, 1 + draft, visible_lens, lens)])


def test_tiles_of_a_long_pass():
    """513 rows of draft and 16 questions of 60, 8 query heads a KV head."""
    layout = pass_of(8192, 512, 16, 60)
    assert layout.num_rows == 1473
    assert flashinfer(layout, 8, is_masked=True).tiles == 93
    assert flashinfer(layout, 8, is_masked=False).tiles == 33 + 16 * 4


def test_columns_by_hand():
    """One question of 2 rows after the first of 3 draft rows, 5 context tokens."""
    layout = VerifyLayout.of([RequestLayout(5, 3, (1,), (2,))])
    assert flashinfer(layout, 1, is_masked=True).columns == 5 + 3 + 2
    assert flashinfer(layout, 1, is_masked=False).columns == (5 + 3) + (5 + 1 + 2)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("context", [2048, 8192, 32768])
def test_auto_uses_the_layout_that_loads_less(kernel: str, context: int):
    """In FlashInfer a mask tests every loaded element, in Triton only those of new rows."""
    layout = pass_of(context, 256, 16, 60)
    masked, alias = (KERNELS[kernel](layout, 8, is_masked=m) for m in (True, False))
    chosen, _ = choose_layout("auto", kernel, 1)
    assert chosen == ("alias" if kernel == "flashinfer" else "mask")
    if chosen == "mask":
        assert masked.columns < 0.7 * alias.columns
    else:
        assert alias.columns < 1.1 * masked.columns
        assert masked.mask_bytes == 1217 * (context + 1217)
