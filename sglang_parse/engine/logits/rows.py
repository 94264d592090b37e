"""Rows of logits and the tokens in front of each: what every module of this package works on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sglang_parse.engine.sglang_types import Req

PIECE_BYTES = 2**25
"""fp32 logits that are adjusted or converted at a time: bounds the memory that it takes."""


def rows_per_piece(vocab_size: int) -> int:
    return max(1, PIECE_BYTES // (4 * vocab_size))


def pieces(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Slices of rows that are converted at a time."""
    size = rows_per_piece(vocab_size)
    return (slice(start, start + size) for start in range(0, num_rows, size))


@dataclass(frozen=True, slots=True)
class LogitsRows:
    """Consecutive rows of logits of one request.

    A pass over a draft "d e" behind the output "a b c": 3 rows from ``start``, before "a b c",
    after "d e". The first row's token follows "a b c", the second's "a b c d", the third's "a b c d
    e": as many tokens are penalized there.

    Attributes:
        start, count: which rows.
        before: output tokens; their sequence is not copied.
        after: tokens of the draft. The first row has ``first`` of them in front, every further row
            one more; rows past the last one have all.
    """

    req: Req
    start: int
    count: int = 1
    before: Sequence[int] = ()
    after: Sequence[int] = ()
    first: int = 0

    @property
    def rows(self) -> range:
        return range(self.start, self.start + self.count)

    def num_before(self, row: int) -> int:
        """Output tokens in front of one of its rows."""
        return len(self.before) + min(self.first + row - self.start, len(self.after))

    def split(self, size: int) -> Iterator[LogitsRows]:
        """The same rows in pieces of at most ``size``."""
        for low in range(0, self.count, size):
            yield replace(
                self,
                start=self.start + low,
                count=min(size, self.count - low),
                first=self.first + low,
            )
