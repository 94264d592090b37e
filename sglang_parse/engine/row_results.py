"""What rows of logits say: the target's choices, verdicts, scores and log probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_parse.core.phases import Action
from sglang_parse.device import on_device
from sglang_parse.engine.faults import mark_faults, nan_rows
from sglang_parse.engine.forward import RequestRows
from sglang_parse.engine.judge.judge import Judge
from sglang_parse.engine.judge.scorer import Scorer, next_likelihoods
from sglang_parse.engine.logits.adjust import adjust
from sglang_parse.engine.logits.logprobs import LogprobRows
from sglang_parse.engine.logits.rows import LogitsRows
from sglang_parse.engine.logits.sampling import prepare_rows
from sglang_parse.engine.requests import is_adjusted
from sglang_parse.engine.sglang_types import Req, ScheduleBatch
from sglang_parse.engine.target import TargetModel


@dataclass(frozen=True, slots=True)
class RowResults:
    """What rows of logits say, on the device, by the order of the requests that they belong to.

    A draft of 3 tokens asked about at its end, judged by the likelihood and the question: 4 tokens,
    4 scores, 1 answer; 4 records, if the request asks for log probabilities.

    Attributes:
        tokens: int64 [token rows] the target's choice, or ``faults.mark_faults``'s.
        scores: fp32 [token rows, 4] each row's ``Scorer.scores``, 0 without one, and
            ``next_likelihoods``; None where nothing scores tokens.
        answers: fp32 [questions, 2] verdict and mass, NaN where logits held one; None without.
        records: float64 [asked rows, width] ``logprobs.Record`` of requests that ask; None without.
    """

    tokens: torch.Tensor
    scores: torch.Tensor | None = None
    answers: torch.Tensor | None = None
    records: torch.Tensor | None = None

    @classmethod
    def columns(cls, some: Sequence[RowResults]) -> list[list[torch.Tensor]]:
        """Of each of its fields the tensors that ``some`` have, in their order."""
        rows = ((one.tokens, one.scores, one.answers, one.records) for one in some)
        return [[one for one in column if one is not None] for column in zip(*rows, strict=True)]


class RowReader:
    """Reads rows of the target's logits, once they are adjusted; ``judge`` is None in token mode.

    Attributes:
        captures: whether verdicts need hidden states of the target.
    """

    def __init__(self, target: TargetModel, judge: Judge | None) -> None:
        self._runner, self._judge = target.runner, judge
        self.captures = judge is not None and judge.captured is not None
        self._scores_rows = self.captures or (judge is not None and judge.scorer is not None)

    def results(
        self,
        batch: ScheduleBatch,
        parts: Sequence[RequestRows],
        logits: torch.Tensor,
        hidden: torch.Tensor | None = None,
        ids: torch.Tensor | None = None,
    ) -> tuple[RowResults, LogitsProcessorOutput]:
        """What the rows of drafts, or decode rows, say; and the sampler's output. Overwrites the
        logits.

        Verdicts of a head, too, are about the adjusted logits, under which the draft was written.

        Args:
            parts: all of them with drafts, or none.
            hidden: [rows of the forward, width] captured hidden states, if any.
            ids: int64 [rows of the forward] where the host does not know all of them; then all rows
                are token rows.
        """
        is_bad, reqs = nan_rows(logits), batch.reqs
        judge = None if parts[0].action is Action.DECODE else self._judge
        is_empty = adjust(logits, _token_rows(reqs, parts, is_adjusted))
        asking = _token_rows(reqs, parts, lambda req: req.return_logprob)
        asked = LogprobRows(asking, reqs, logits.device) if asking else None
        index = scores = answers = None
        if judge and len(logits) > sum(part.num_token_rows for part in parts):
            token_index, answer_index = _logits_places(parts)
            index = on_device(token_index, logits.device)
            answer_rows = on_device(answer_index, logits.device)
            answers = judge.answers(logits[answer_rows])
            answers = answers.masked_fill(is_bad[answer_rows, None], math.nan)
        if judge and self._scores_rows:
            scores = _score(judge.scorer, parts, logits, index, hidden, ids)
        choices, output = self._choose(batch, parts, logits, index, asked)
        records = asked.records(logits, choices) if asked else None
        tokens = mark_faults(choices, is_bad, is_empty)
        tokens = tokens if index is None else tokens[index]
        return RowResults(tokens, scores, answers, records), output

    def _choose(
        self,
        batch: ScheduleBatch,
        parts: Sequence[RequestRows],
        logits: torch.Tensor,
        index: torch.Tensor | None,
        asked: LogprobRows | None,
    ) -> tuple[torch.Tensor, LogitsProcessorOutput]:
        """int64 [n] the target's choice at every token row of logits [n, vocab]; and the sampler's
        output.

        Args:
            index: int64 the token rows; None if all are.
            asked: rows that are read afterwards.
        """
        rows = [(part.index, k) for part in parts for k in range(part.num_token_rows)]
        prepared = prepare_rows(self._runner, batch, [i for i, _ in rows])
        if prepared.is_argmax:  # of all rows: selecting first would copy the logits
            return logits.argmax(dim=-1), LogitsProcessorOutput(next_token_logits=logits)
        if asked:
            asked.keep(logits)
        lens = [batch.reqs[i].parse_state.committed_len + k for i, k in rows]
        positions = on_device(lens, logits.device)
        if index is None:
            return prepared.sample(logits, positions)
        tokens, output = prepared.sample(logits[index], positions)
        choices = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        return choices.index_copy_(0, index, tokens), output


def _token_rows(
    reqs: Sequence[Req], parts: Sequence[RequestRows], belongs: Callable[[Req], bool]
) -> list[LogitsRows]:
    """Token rows, among the parts' logits, of the requests that belong."""
    found, start = [], 0
    for part in parts:
        req, count = reqs[part.index], part.num_token_rows
        if belongs(req):
            before, drafted = req.parse_state.output_ids, part.drafted_ids
            found.append(LogitsRows(req, start, count, before, drafted))
        start += len(part.logits_rows)
    return found


def _logits_places(parts: Sequence[RequestRows]) -> tuple[list[int], list[int]]:
    """Rows of the parts' logits that are token rows, and the questions' last rows."""
    tokens: list[int] = []
    answers: list[int] = []
    start = 0
    for part in parts:
        middle, end = start + part.num_token_rows, start + len(part.logits_rows)
        tokens.extend(range(start, middle))
        answers.extend(range(middle, end))
        start = end
    return tokens, answers


def _score(
    scorer: Scorer | None,
    parts: Sequence[RequestRows],
    logits: torch.Tensor,
    index: torch.Tensor | None,
    hidden: torch.Tensor | None,
    ids: torch.Tensor | None,
) -> torch.Tensor:
    """fp32 [token rows, 4] their ``Scorer.scores``, 0 without one, and ``next_likelihoods``."""
    if ids is None:
        drafted = [token for part in parts for token in (*part.drafted_ids, 0)]
        next_ids = on_device(drafted, logits.device)
    else:  # a part's last row has none, as above
        next_ids = ids.roll(-1)
    likelihoods = next_likelihoods(logits, index, next_ids)
    if scorer is None:
        return torch.nn.functional.pad(likelihoods, (2, 0))
    if hidden is not None:
        starts = accumulate((part.layout.num_rows for part in parts), initial=0)
        rows = [
            start + row
            for start, part in zip(starts, parts, strict=False)
            for row in part.token_rows
        ]
        hidden = hidden[on_device(rows, hidden.device)]
    return torch.cat([scorer.scores(hidden, likelihoods), likelihoods], dim=-1)
