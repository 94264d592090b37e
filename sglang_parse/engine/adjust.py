"""Logit adjustments: what a request's parameters change in logits before a token is chosen.

The one place for them: the draft model's logits, the target's in verify passes, decode steps and
prefills all come here, before the sampler. So a draft is written, and verified, under the same
adjustments as plain decoding: each row's depend on the tokens in front of it, those of the draft
included. SGLang's sampler gets logits that are adjusted already (``sampling``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import ClassVar, Protocol

import torch

from sglang_parse.engine.sglang_types import Req

PIECE_BYTES = 2**26
"""fp32 logits that are adjusted at a time: bounds the memory that it takes."""


@dataclass(frozen=True, slots=True)
class LogitsRows:
    """Consecutive rows of logits of one request.

    Attributes:
        req: the request.
        start, count: which rows.
        before: output tokens, those of the draft included, in front of what the first row predicts.
        after: every further row has one more of these in front; rows past the last one have all.
    """

    req: Req
    start: int
    count: int = 1
    before: Sequence[int] = ()
    after: Sequence[int] = ()

    def split(self, size: int) -> Iterator[LogitsRows]:
        """The same rows in pieces of at most ``size``."""
        for low in range(0, self.count, size):
            yield replace(
                self,
                start=self.start + low,
                count=min(size, self.count - low),
                before=[*self.before, *self.after[:low]],
                after=self.after[low:],
            )


class Adjuster(Protocol):
    """One kind of adjustment, of rows of requests that have it.

    Args:
        parts: the rows; ``adjusts`` holds for each request.
        device: of the logits.
    """

    def __init__(self, parts: Sequence[LogitsRows], device: torch.device) -> None: ...

    @staticmethod
    def adjusts(req: Req) -> bool:
        """Whether a request has it; asked once, at admission, and per forward after that."""

    def apply(self, logits: torch.Tensor) -> None:
        """Changes its rows of logits [n, vocab] in place; the draft model's too."""

    def advance(self, tokens: torch.Tensor) -> None:
        """The next rows follow one token more.

        Args:
            tokens: int64 [n] on the device, for every row of the logits; all parts have one row.
        """


class Adjustment:
    """All adjustments of some rows, in the order of SGLang's sampler."""

    KINDS: ClassVar[tuple[type[Adjuster], ...]] = ()

    def __init__(self, parts: Sequence[LogitsRows], device: torch.device) -> None:
        self._adjusters = [
            kind(chosen, device)
            for kind in self.KINDS
            if (chosen := [part for part in parts if kind.adjusts(part.req)])
        ]

    @classmethod
    def adjusts(cls, req: Req) -> bool:
        """Whether a request has any adjustment: ``RequestPolicy.is_adjusted``."""
        return any(kind.adjusts(req) for kind in cls.KINDS)

    def apply(self, logits: torch.Tensor) -> None:
        """See ``Adjuster.apply``."""
        for adjuster in self._adjusters:
            adjuster.apply(logits)

    def advance(self, tokens: torch.Tensor) -> None:
        """See ``Adjuster.advance``."""
        for adjuster in self._adjusters:
            adjuster.advance(tokens)


def adjust(logits: torch.Tensor, parts: Sequence[LogitsRows]) -> None:
    """Adjusts rows of logits [n, vocab] in place, in pieces of bounded memory.

    Args:
        parts: rows of requests that are adjusted.
    """
    size = max(1, PIECE_BYTES // (4 * logits.shape[1]))
    piece: list[LogitsRows] = []
    num_rows = 0
    for part in chain.from_iterable(part.split(size) for part in parts):
        if num_rows + part.count > size:
            Adjustment(piece, logits.device).apply(logits)
            piece, num_rows = [], 0
        piece.append(part)
        num_rows += part.count
    if piece:
        Adjustment(piece, logits.device).apply(logits)
