"""The rows of a verify pass.

Each request appends ``num_rows`` rows to ``prefix_len`` tokens that are already in the KV cache:

    rows [0, num_draft_rows)                   draft, causal
    rows [question_starts[k], ... + len_k)     question k, k = 0 .. K-1

Columns of the attention matrix: [0, prefix_len) context, then one per row in the same order.
In a server the first draft row is the last committed token, whose KV is not written yet.

Two equivalent attention layouts (``--parse-layout``):

    mask     one sequence per request with the custom mask of ``mask.flat_mask``
    alias    causal pseudo-sequences without a mask: the draft rows are one, and each question is
             another whose context are its visible columns, in the request's KV slots
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class PseudoSequence:
    """Rows that attend as one causal sequence to a context.

    Attributes:
        request: index of the request.
        start: first row, relative to the request's first.
        context_len: columns [0, context_len) of the request are the context.
        start_column: column of the first row; need not follow the context.
    """

    request: int
    start: int
    num_rows: int
    context_len: int
    start_column: int

    @property
    def prefix_len(self) -> int:
        """The request's ``prefix_len``."""
        return self.start_column - self.start

    @property
    def kv_len(self) -> int:
        """Columns visible to the last row."""
        return self.context_len + self.num_rows


@dataclass(frozen=True, slots=True)
class RequestLayout:
    """The rows of one request.

    An anchor and 4 draft tokens behind a context of 10, a question of 3 tokens about the first 2:

    >>> rows = RequestLayout(10, 5, visible_lens=(3,), question_lens=(3,))
    >>> rows.num_rows
    8

    Attributes:
        prefix_len: context tokens in the KV cache.
        num_draft_rows: causal draft rows, at least 1.
        visible_lens: [K] leading draft rows visible to each question, in any order.
        question_lens: [K] tokens of each question, at least 1.
    """

    prefix_len: int
    num_draft_rows: int
    visible_lens: tuple[int, ...] = ()
    question_lens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.visible_lens) != len(self.question_lens):
            raise ValueError(
                f"{len(self.visible_lens)} visible_lens for {len(self.question_lens)} questions"
            )
        if self.prefix_len < 0 or self.num_draft_rows < 1:
            raise ValueError(
                f"prefix_len {self.prefix_len} (>= 0) and num_draft_rows "
                f"{self.num_draft_rows} (>= 1) are out of range"
            )
        if any(not 0 <= n <= self.num_draft_rows for n in self.visible_lens):
            raise ValueError(f"visible_lens {self.visible_lens} outside 0..{self.num_draft_rows}")
        if any(length < 1 for length in self.question_lens):
            raise ValueError(f"empty question in {self.question_lens}")

    def at(self, prefix_len: int) -> RequestLayout:
        """Returns the same rows after a context of this length."""
        return replace(self, prefix_len=prefix_len)

    @property
    def is_causal(self) -> bool:
        return not self.question_lens

    @property
    def num_questions(self) -> int:
        return len(self.visible_lens)

    @property
    def question_starts(self) -> tuple[int, ...]:
        """First row of each question."""
        return tuple(accumulate(self.question_lens, initial=self.num_draft_rows))[:-1]

    @property
    def num_rows(self) -> int:
        return self.num_draft_rows + sum(self.question_lens)

    @property
    def kv_len(self) -> int:
        """Columns of this request."""
        return self.prefix_len + self.num_rows

    @property
    def verdict_rows(self) -> tuple[int, ...]:
        """Last row of each question, whose logits give the verdict."""
        return tuple(
            start + length - 1
            for start, length in zip(self.question_starts, self.question_lens, strict=True)
        )

    def positions(self) -> list[int]:
        """[num_rows] positions; a question's follow its visible draft rows."""
        positions = list(range(self.prefix_len, self.prefix_len + self.num_draft_rows))
        for visible_len, length in zip(self.visible_lens, self.question_lens, strict=True):
            start = self.prefix_len + visible_len
            positions.extend(range(start, start + length))
        return positions

    def pseudo_sequences(self, request: int = 0) -> list[PseudoSequence]:
        """Returns the draft rows, then each question, for layout ``alias``."""
        prefix = self.prefix_len
        sequences = [PseudoSequence(request, 0, self.num_draft_rows, prefix, prefix)]
        for start, visible_len, length in zip(
            self.question_starts, self.visible_lens, self.question_lens, strict=True
        ):
            context_len, start_column = prefix + visible_len, prefix + start
            sequences.append(PseudoSequence(request, start, length, context_len, start_column))
        return sequences


@dataclass(frozen=True, slots=True)
class VerifyLayout:
    """The rows of a batch, request by request."""

    requests: tuple[RequestLayout, ...]

    @classmethod
    def of(cls, requests: Sequence[RequestLayout]) -> VerifyLayout:
        return cls(tuple(requests))

    def at(self, starts: Sequence[int]) -> VerifyLayout:
        """Returns the same rows after contexts of these lengths."""
        return VerifyLayout(tuple(map(RequestLayout.at, self.requests, starts)))

    @property
    def qo_indptr(self) -> list[int]:
        """[len(requests) + 1] CSR offsets of the rows."""
        return list(accumulate((r.num_rows for r in self.requests), initial=0))

    @property
    def kv_indptr(self) -> list[int]:
        """[len(requests) + 1] CSR offsets of the columns."""
        return list(accumulate((r.kv_len for r in self.requests), initial=0))

    @property
    def mask_indptr(self) -> list[int]:
        """[len(requests) + 1] CSR offsets of the flat mask."""
        return list(accumulate((r.num_rows * r.kv_len for r in self.requests), initial=0))

    @property
    def is_causal(self) -> bool:
        return all(request.is_causal for request in self.requests)

    def pseudo_sequences(self) -> list[PseudoSequence]:
        """Returns the batch for layout ``alias``, in row order."""
        return [
            sequence
            for i, request in enumerate(self.requests)
            for sequence in request.pseudo_sequences(i)
        ]

    @property
    def num_rows(self) -> int:
        return sum(r.num_rows for r in self.requests)

    @property
    def mask_size(self) -> int:
        """Entries of ``mask.flat_mask``."""
        return self.mask_indptr[-1]

    def positions(self) -> list[int]:
        return [position for request in self.requests for position in request.positions()]
