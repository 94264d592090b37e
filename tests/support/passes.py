"""Verify passes for GPU attention kernels: for tests and mask_cost.py."""

from __future__ import annotations

from sglang_parse.core.block import BlockKind, Masks
from sglang_parse.core.layout import RequestLayout

QUESTION_LEN = 9
"""Tokens of the demo's question; questions of a pass differ by up to 3."""


def request(prefix_len: int, draft_len: int, num_questions: int) -> RequestLayout:
    """Evenly spaced prefixes, the complete draft last; the first row is the last output token."""
    visible_lens = [1 + draft_len * (k + 1) // num_questions for k in range(num_questions)]
    lens = [QUESTION_LEN - 3 + k % 7 for k in range(num_questions)]
    return RequestLayout(prefix_len, 1 + draft_len, tuple(visible_lens), tuple(lens))


def block(prefix_len: int, masks: Masks, size: int = 8) -> RequestLayout:
    """A forward of a draft that writes several tokens."""
    return BlockKind(size, masks).rows(prefix_len)


PASSES = {
    "no prefix": [request(0, 1, 1)],
    "one question": [request(100, 64, 1)],
    "usual": [request(1024, 128, 16)],
    "ragged": [
        request(0, 17, 3),
        RequestLayout(513, 1),  # decodes
        request(1000, 128, 16),
        RequestLayout(0, 1),
        request(37, 5, 5),
        RequestLayout(8192, 1),
        request(4095, 64, 8),
    ],
    "long prefix": [request(8192, 128, 16), request(8191, 1, 1)],
    "long draft": [request(1024, 2048, 64)],
    "both long": [request(8192, 2048, 64), RequestLayout(700, 1)],
    "blocks": [block(200 * i, masks) for i, masks in enumerate([Masks.EVERY, Masks.LAST] * 8)],
    "64 decode, 4 verify": [
        *(RequestLayout(97 * i, 1) for i in range(64)),
        *(request(300 * i, 128, 16) for i in range(4)),
    ],
}
