"""Logit adjustments: what a request's parameters change in logits before a token is chosen.

The one place for them: the draft model's logits, the target's in verify passes, decode steps and
prefills all come here, before the sampler. So a draft is written, and verified, under the same
adjustments as plain decoding: each row's depend on the tokens in front of it, those of the draft
included. SGLang's sampler gets logits that are adjusted already (``sampling``).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, ClassVar, Protocol

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from sglang_parse.device import on_device
from sglang_parse.engine.batch import spans_within
from sglang_parse.engine.faults import contain_request, reset_rows
from sglang_parse.engine.logits.grammar import is_constrained, rows_of
from sglang_parse.engine.logits.rows import LogitsRows, rows_per_piece
from sglang_parse.engine.requests import end_ids_of
from sglang_parse.engine.sglang_types import Req
from sglang_parse.startup.fallback import is_pure


class Adjuster(Protocol):
    """One kind of adjustment, of ``parts``: rows of requests that it ``adjusts``."""

    def __init__(self, parts: Sequence[LogitsRows], device: torch.device) -> None: ...

    @staticmethod
    def adjusts(req: Req) -> bool:
        """Whether a request has it; asked once, at admission, and per forward after that."""

    def apply(self, logits: torch.Tensor) -> None:
        """Changes its rows of logits [n, vocab] in place; the draft model's too."""

    def advance(self, tokens: torch.Tensor) -> None:
        """The next rows follow one token more: of ``tokens``, int64 [n] on the device, for each row
        of the logits; all parts have one row."""


class Penalties:
    """Repetition, presence and frequency penalties of the output tokens in front of a row.

    Source: ``sglang.srt.sampling.penaltylib``, which counts one token per request and step.
    """

    def __init__(self, parts: Sequence[LogitsRows], device: torch.device) -> None:
        self._parts, self._device = parts, device
        self._rows = on_device([row for part in parts for row in part.rows], device)
        params = [part.req.sampling_params for part in parts for _ in part.rows]
        numbers = [[p.frequency_penalty, p.presence_penalty, p.repetition_penalty] for p in params]
        columns = on_device(numbers, device, torch.float32)
        self._frequency, self._presence, self._repetition = columns.split(1, dim=1)
        self._counts: torch.Tensor | None = None

    @staticmethod
    def adjusts(req: Req) -> bool:
        params = req.sampling_params
        return bool(
            params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0
        )

    def apply(self, logits: torch.Tensor) -> None:
        if self._counts is None:
            self._counts = self._count(logits.shape[1])
        is_seen = self._counts > 0
        rows = logits[self._rows]
        rows -= self._counts * self._frequency
        rows -= is_seen * self._presence
        scale = torch.where(is_seen, self._repetition, 1.0)
        logits[self._rows] = torch.where(rows < 0, rows * scale, rows / scale).to(logits.dtype)

    def advance(self, tokens: torch.Tensor) -> None:
        assert self._counts is not None
        chosen = tokens[self._rows, None]
        self._counts.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.float32))

    def _count(self, vocab_size: int) -> torch.Tensor:
        """fp32 [rows, vocab] how often each token is in front of each row."""
        places: list[int] = []
        starts = [*accumulate((part.count for part in self._parts), initial=0)]
        for part, start in zip(self._parts, starts, strict=False):
            for place, token in enumerate(part.after[: part.first + part.count - 1]):
                places.append((start + max(0, place + 1 - part.first)) * vocab_size + token)
        counts = torch.zeros(starts[-1] * vocab_size, device=self._device)
        counts = _count_into(counts, places).view(-1, vocab_size)
        for part, start in zip(self._parts, starts, strict=False):
            counts[start] += _output_counts(part, vocab_size, self._device)
            if part.count > 1:
                counts[start : start + part.count].cumsum_(0)
        return counts


def _count_into(counts: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """Adds 1 to fp32 ``counts`` at each of ``places``, as often as it is named."""
    index = on_device(places, counts.device)
    return counts.scatter_add_(0, index, torch.ones_like(index, dtype=torch.float32))


def _output_counts(part: LogitsRows, vocab_size: int, device: torch.device) -> torch.Tensor:
    """fp32 [vocab] how often each token is in a request's output: what is new is added. A
    retraction takes output back, and it is counted again."""
    notes: Any = part.req.parse_state.notes
    counts, num_counted = notes.output_counts or (torch.zeros(0), 0)
    if len(counts) < vocab_size or num_counted > len(part.before):
        counts, num_counted = torch.zeros(vocab_size, device=device), 0
    if num_counted < len(part.before):
        _count_into(counts, [*part.before[num_counted:]])
    notes.output_counts = counts, len(part.before)
    return counts[:vocab_size]


class MinNewTokens:
    """Removes the tokens that end an answer before it has ``min_new_tokens``."""

    def __init__(self, parts: Sequence[LogitsRows], device: torch.device) -> None:
        self._parts, self._device, self._num_more = parts, device, 0

    @staticmethod
    def adjusts(req: Req) -> bool:
        return req.sampling_params.min_new_tokens > 0

    def apply(self, logits: torch.Tensor) -> None:
        places = [
            (row, token)
            for part in self._parts
            for row in part.rows
            if part.num_before(row) + self._num_more < part.req.sampling_params.min_new_tokens
            for token in end_ids_of(part.req)
        ]
        if places:
            rows, tokens = on_device([*zip(*places, strict=True)], self._device).unbind()
            never = torch.full((), float("-inf"), dtype=logits.dtype, device=logits.device)
            logits.index_put_((rows, tokens), never)

    def advance(self, tokens: torch.Tensor) -> None:
        del tokens
        self._num_more += 1


class _OnHost:
    """Base of adjustments that read tokens on the host, which ``advance`` waits for."""

    def __init__(self, parts: Sequence[LogitsRows], device: torch.device) -> None:
        del device
        self._parts = [*parts]

    def advance(self, tokens: torch.Tensor) -> None:
        chosen = tokens.tolist()
        self._parts = [
            replace(part, after=[*part.after, chosen[part.start]], first=part.first + 1)
            for part in self._parts
        ]


class GrammarMask(_OnHost):
    """Removes the tokens that a request's grammar refuses."""

    @staticmethod
    def adjusts(req: Req) -> bool:
        return is_constrained(req)

    def apply(self, logits: torch.Tensor) -> None:
        """Rows past the last token, of a block's masks, may propose anything."""
        places: list[int] = []
        rows: list[torch.Tensor] = []
        grammar: Any = None
        for part in self._parts:
            after = part.after[: part.first + part.count - 1]
            found = rows_of(part.req.parse_state, part.before, after)[part.first :]
            for place, row in enumerate(found, start=part.start):
                if row is not None:
                    grammar = part.req.grammar
                    places.append(place)
                    rows.append(row)
        if not rows:
            return
        mask = grammar.move_vocab_mask(torch.stack(rows), logits.device)
        if len(rows) == len(logits):
            grammar.apply_vocab_mask(logits=logits, vocab_mask=mask)
            return
        index = on_device(places, logits.device)
        chosen = logits[index]
        grammar.apply_vocab_mask(logits=chosen, vocab_mask=mask)
        logits[index] = chosen


class LogitBias:
    def __init__(self, parts: Sequence[LogitsRows], device: torch.device) -> None:
        self._biases = []
        for part in parts:
            given = part.req.sampling_params.logit_bias
            bias = {int(token): value for token, value in given.items()}  # "1" and "01" are one
            values = on_device([*bias.values()], device, torch.float32)
            self._biases.append((part, on_device([*bias], device), values))

    @staticmethod
    def adjusts(req: Req) -> bool:
        return bool(req.sampling_params.logit_bias)

    def apply(self, logits: torch.Tensor) -> None:
        for part, tokens, values in self._biases:
            rows = logits[part.start : part.start + part.count]
            rows.index_add_(1, tokens, values.to(logits.dtype).expand(part.count, -1))

    def advance(self, tokens: torch.Tensor) -> None:
        """Is the same for every token."""


class CustomProcessors(_OnHost):
    """Custom logit processors that are pure (``fallback.is_pure``), one request at a time."""

    @staticmethod
    def adjusts(req: Req) -> bool:
        return req.custom_logit_processor is not None and is_pure(req.custom_logit_processor)

    def apply(self, logits: torch.Tensor) -> None:
        for part in self._parts:
            process = CustomLogitProcessor.from_str(part.req.custom_logit_processor)
            params = part.req.sampling_params.custom_params
            given = [params and params | {"__req__": _RequestAtRow(part, row)} for row in part.rows]
            rows = logits[part.start : part.start + part.count]
            with contain_request(part.req.parse_state, "its custom logit processor"):
                rows.copy_(process(rows.clone(), given))


class _RequestAtRow:
    """A request whose output are the tokens in front of a row; otherwise SGLang's own."""

    def __init__(self, part: LogitsRows, row: int) -> None:
        self._part, self._row = part, row

    @property
    def output_ids(self) -> array:
        part = self._part
        num_new = part.first + self._row - part.start
        return array("q", [*part.before, *part.after[:num_new]])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part.req, name)


class Adjustment:
    """All adjustments of some rows, in the order of SGLang's sampler."""

    KINDS: ClassVar[tuple[type[Adjuster], ...]] = (
        Penalties,
        MinNewTokens,
        GrammarMask,
        LogitBias,
        CustomProcessors,
    )

    def __init__(self, parts: Sequence[LogitsRows], device: torch.device) -> None:
        self._adjusters: list[Adjuster] = [
            kind(chosen, device)
            for kind in self.KINDS
            if (chosen := [part for part in parts if kind.adjusts(part.req)])
        ]

    @classmethod
    def adjusts(cls, req: Req) -> bool:
        """Whether a request has any adjustment: ``RequestPolicy.is_adjusted``."""
        return any(kind.adjusts(req) for kind in cls.KINDS)

    def apply(self, logits: torch.Tensor) -> None:
        for adjuster in self._adjusters:
            adjuster.apply(logits)

    def advance(self, tokens: torch.Tensor) -> None:
        for adjuster in self._adjusters:
            adjuster.advance(tokens)


def adjust(logits: torch.Tensor, parts: Sequence[LogitsRows]) -> torch.Tensor | None:
    """Adjusts rows of logits [n, vocab] in place, in pieces of bounded memory.

    Args:
        parts: rows of requests that are adjusted.

    Returns:
        bool [n] the rows of which nothing finite is left, set to 0: a sampler would raise. None
        without ``parts``.
    """
    if not parts:
        return None
    size = rows_per_piece(logits.shape[1])
    pieces = [piece for part in parts for piece in part.split(size)]
    for span in spans_within([(piece.count,) for piece in pieces], (size,)):
        Adjustment(pieces[span], logits.device).apply(logits)
    rows = on_device([row for part in parts for row in part.rows], logits.device)
    is_adjusted = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    is_adjusted.index_fill_(0, rows, True)
    return reset_rows(logits, ~logits.amax(dim=-1).isfinite() & is_adjusted)
