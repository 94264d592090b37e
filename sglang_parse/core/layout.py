"""The rows of one verification pass: which token sits where, at which position, and whose it is.

Per request the pass appends ``num_rows`` rows to a context of ``prefix_len`` tokens that are
already in the KV cache:

    rows [0, num_draft_rows)                   the draft, causal among itself
    rows [question_starts[k], ... + len_k)     question k, k = 0 .. K-1

Columns of the attention matrix: [0, prefix_len) context, then one per row in the same order.
In a server the first draft row is the last committed token, whose KV is not written yet.

Two ways to run these rows, equal in result (``--parse-layout``):

    mask     one sequence per request, under the mask of ``mask.flat_mask``
    alias    pseudo-sequences, causal and without a mask: the draft rows are one, each question is
             another whose context are the columns it may see, in the request's own KV slots
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class PseudoSequence:
    """Rows that attend as one ordinary sequence: to ``context_len`` columns, then causally.

    Attributes:
        request: index of the request whose columns these are.
        start: its first row, counted from the request's first.
        num_rows: how many rows.
        context_len: columns [0, context) of the request that all of its rows see.
        start_column: the column of its first row; context and own columns need not touch.
    """

    request: int
    start: int
    num_rows: int
    context_len: int
    start_column: int

    @property
    def prefix_len(self) -> int:
        """The request's: columns in front of all its rows."""
        return self.start_column - self.start

    @property
    def kv_len(self) -> int:
        """Columns its last row sees."""
        return self.context_len + self.num_rows


@dataclass(frozen=True, slots=True)
class RequestLayout:
    """One request's rows. Lengths are counts of tokens.

    Attributes:
        prefix_len: context tokens whose KV is already written.
        num_draft_rows: causal rows.
        visible_lens: per question, how many draft rows it may see; ascending is not required.
        question_lens: per question, its number of tokens (>= 1).
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
        if any(not 0 <= cut <= self.num_draft_rows for cut in self.visible_lens):
            raise ValueError(f"visible_lens {self.visible_lens} outside 0..{self.num_draft_rows}")
        if any(length < 1 for length in self.question_lens):
            raise ValueError(f"empty question in {self.question_lens}")

    def at(self, prefix_len: int) -> RequestLayout:
        """The same rows behind a context of this length."""
        return replace(self, prefix_len=prefix_len)

    @property
    def is_causal(self) -> bool:
        """Whether each row sees all before it: a mask would say no more."""
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
        """Columns of this request's part of the mask."""
        return self.prefix_len + self.num_rows

    @property
    def verdict_rows(self) -> tuple[int, ...]:
        """Last row of each question: its logits hold the verdict."""
        return tuple(
            start + length - 1
            for start, length in zip(self.question_starts, self.question_lens, strict=True)
        )

    def positions(self) -> list[int]:
        """[num_rows] position of every row: a question's follow its cut, as if it stood alone."""
        positions = list(range(self.prefix_len, self.prefix_len + self.num_draft_rows))
        for cut, length in zip(self.visible_lens, self.question_lens, strict=True):
            start = self.prefix_len + cut
            positions.extend(range(start, start + length))
        return positions

    def pseudo_sequences(self, request: int = 0) -> list[PseudoSequence]:
        """The rows without a mask, in order: the draft, then every question."""
        prefix = self.prefix_len
        sequences = [PseudoSequence(request, 0, self.num_draft_rows, prefix, prefix)]
        for start, cut, length in zip(
            self.question_starts, self.visible_lens, self.question_lens, strict=True
        ):
            own = PseudoSequence(request, start, length, prefix + cut, prefix + start)
            sequences.append(own)
        return sequences


@dataclass(frozen=True, slots=True)
class VerifyLayout:
    """The rows of a whole pass: the requests' rows, concatenated in order."""

    requests: tuple[RequestLayout, ...]

    @classmethod
    def of(cls, requests: Sequence[RequestLayout]) -> VerifyLayout:
        return cls(tuple(requests))

    def at(self, starts: Sequence[int]) -> VerifyLayout:
        """The same rows behind contexts of these lengths."""
        return VerifyLayout(tuple(map(RequestLayout.at, self.requests, starts)))

    @property
    def qo_indptr(self) -> list[int]:
        """[len(requests) + 1] CSR offsets of the requests' rows."""
        return list(accumulate((r.num_rows for r in self.requests), initial=0))

    @property
    def kv_indptr(self) -> list[int]:
        """[len(requests) + 1] CSR offsets of the requests' columns."""
        return list(accumulate((r.kv_len for r in self.requests), initial=0))

    @property
    def mask_indptr(self) -> list[int]:
        """[len(requests) + 1] offsets of the requests' parts of the flat mask."""
        return list(accumulate((r.num_rows * r.kv_len for r in self.requests), initial=0))

    @property
    def is_causal(self) -> bool:
        """Whether each row sees all of its request's before it."""
        return all(request.is_causal for request in self.requests)

    def pseudo_sequences(self) -> list[PseudoSequence]:
        """The whole pass without a mask; the rows keep their order."""
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
        """Entries of the flat mask."""
        return self.mask_indptr[-1]

    def positions(self) -> list[int]:
        return [position for request in self.requests for position in request.positions()]
