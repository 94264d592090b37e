"""Readout of a verification pass: logits to a few numbers per request, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice

import torch

from sglang_parse.core.phases import TraceRecord
from sglang_parse.core.question import Question
from sglang_parse.core.request import RequestState
from sglang_parse.core.selection import Selection
from sglang_parse.device import HostCopy, on_device
from sglang_parse.engine.broadcast import share
from sglang_parse.engine.faults import nan_rows
from sglang_parse.engine.rows import VerifyRows
from sglang_parse.engine.sampling import RowSampler


@dataclass(frozen=True, slots=True)
class Readout:
    """What the target says about one request's draft.

    Attributes:
        choices: [judged tokens + 1] the target's own next token behind the draft's first k tokens.
        verdicts: [num_prefixes] p(accept) / (p(accept) + p(reject)); empty in token mode.
        mass: [num_prefixes] p(accept) + p(reject).
        is_faulty: some logits held a NaN; the rest then means nothing.
    """

    choices: list[int]
    verdicts: list[float]
    mass: list[float]
    is_faulty: bool


@dataclass(frozen=True, slots=True)
class Spoken:
    """What the target said in one stage, on the host. Rows are those of the scheduler's batch.

    Attributes:
        judged: [requests whose draft was judged] their rows of the pass, and the readout.
        checked: [requests with an EAGLE-3 head ahead] row, proposed tokens, readout.
        stepped: [requests that wrote one token] row, token id or ``broadcast.NO_TOKEN``.
    """

    judged: Sequence[tuple[VerifyRows, Readout]]
    checked: Sequence[tuple[int, Sequence[int], Readout]]
    stepped: Sequence[tuple[int, int]]


class Measured:
    """Some requests' part of a pass, measured on the device: one broadcast, one copy to the host.

    Args:
        parts: the requests' rows; may be empty.
        logits: [sum of len(part.logits_rows), vocab] in the parts' order; overwritten.
        sampler: the target's sampler over the scheduler's batch.
        question: what was asked; None in token mode.
    """

    def __init__(
        self,
        parts: Sequence[VerifyRows],
        logits: torch.Tensor,
        sampler: RowSampler,
        question: Question | None,
    ) -> None:
        self.parts = parts
        self._on_host = None
        if parts:
            self._on_host = HostCopy(share(_measure(parts, logits, sampler, question)))

    def readouts(self) -> list[tuple[VerifyRows, Readout]]:
        """Each request's rows with what the target says about them; waits for it."""
        values = iter(self._on_host.tolist() if self._on_host else ())
        return [
            (part, _readout(part, list(islice(values, len(part.logits_rows)))))
            for part in self.parts
        ]


def _measure(
    parts: Sequence[VerifyRows],
    logits: torch.Tensor,
    sampler: RowSampler,
    question: Question | None,
) -> torch.Tensor:
    """float64 [rows of logits, 2]: a token id (exact there) or a verdict and its mass; or NaN.
    Where nothing was asked, every row is a token's: [rows of logits, 1]."""
    is_bad = nan_rows(logits)
    if question is None:
        values = _choose(parts, logits, sampler).double()[:, None]
    else:
        values = torch.zeros(len(logits), 2, dtype=torch.float64, device=logits.device)
        asked = on_device(_verdict_rows(parts), logits.device)
        values[asked] = read_verdicts(logits[asked], question).double()
        cuts = on_device(_cut_rows(parts), logits.device)
        values[cuts, 0] = _choose(parts, logits, sampler, cuts).double()
    return values.masked_fill_(is_bad[:, None], float("nan"))


def read_verdicts(logits: torch.Tensor, question: Question) -> torch.Tensor:
    """float32 [n, 2] verdict and mass, from logits [n, vocab] of the questions' last rows."""
    # Column by column: a list of both would be sent to the device, and waited for.
    pair = torch.stack([logits[:, question.accept_id], logits[:, question.reject_id]], -1).float()
    mass = torch.exp(pair.logsumexp(-1) - logits.float().logsumexp(-1))
    return torch.stack([pair.softmax(-1)[:, 0], mass], dim=-1)


def _choose(
    parts: Sequence[VerifyRows],
    logits: torch.Tensor,
    sampler: RowSampler,
    cuts: torch.Tensor | None = None,
) -> torch.Tensor:
    """The target's own next token at every cut row of every request.

    Args:
        cuts: those of ``logits`` that are; None where all are.
    """
    sampled = sampler.prepare([part.row for part in parts for _ in part.cut_rows])
    if sampled.is_argmax:  # of all: a copy of theirs would take as much memory again
        tokens = logits.argmax(dim=-1)
        return tokens if cuts is None else tokens[cuts]
    cut_logits = logits if cuts is None else logits[cuts]
    positions = [part.layout.prefix_len + cut for part in parts for cut in part.cut_rows]
    tokens, _ = sampled.sample(cut_logits, on_device(positions, logits.device))
    return tokens


def _cut_rows(parts: Sequence[VerifyRows]) -> list[int]:
    """Rows of the pass's logits that stand for a place the draft can be cut."""
    return [start + row for start, part in _starts(parts) for row in range(part.num_cut_rows)]


def _verdict_rows(parts: Sequence[VerifyRows]) -> list[int]:
    """Rows of the pass's logits that hold a verdict."""
    return [
        start + row
        for start, part in _starts(parts)
        for row in range(part.num_cut_rows, len(part.logits_rows))
    ]


def _starts(parts: Sequence[VerifyRows]) -> Iterator[tuple[int, VerifyRows]]:
    start = 0
    for part in parts:
        yield start, part
        start += len(part.logits_rows)


def _readout(part: VerifyRows, values: Sequence[Sequence[float]]) -> Readout:
    if any(math.isnan(value[0]) for value in values):
        return Readout([], [], [], is_faulty=True)
    cuts, verdicts = values[: part.num_cut_rows], values[part.num_cut_rows :]
    return Readout(
        choices=[int(value[0]) for value in cuts],
        verdicts=[verdict for verdict, _ in verdicts],
        mass=[mass for _, mass in verdicts],
        is_faulty=False,
    )


def trace_record(
    state: RequestState,
    readout: Readout,
    selected: Selection,
    own: Sequence[int],
    question: Question | None,
) -> TraceRecord:
    """One round for ``meta_info``; ``own`` is what the target writes behind what is kept."""
    draft = state.draft
    return {
        "output_start": len(state.output_ids),
        "anchor_token_id": state.output_ids[-1],
        "draft_token_ids": list(draft.token_ids),
        "finished": draft.finished,
        "prefix_ends": list(draft.prefix_ends),
        "question_token_ids": [list(ids) for ids in draft.question_ids],
        "accept_token_id": question.accept_id if question else None,
        "reject_token_id": question.reject_id if question else None,
        "verdicts": readout.verdicts,
        "verdict_mass": readout.mass,
        "threshold": state.policy.threshold,
        "selection": selected.rule,
        "accepted_len": selected.accepted_len,
        "decided_by": selected.decided_by,
        "next_token_id": own[0] if own else None,
        "bonus_token_ids": list(own),
        "target_token_ids": readout.choices,
        "plan": asdict(state.plan) if state.plan else {},
    }
