"""The rows one request has in a target forward: what it feeds in, and which logits it needs.

Of a draft that is judged: the anchor (the last output token, whose KV is not written yet), the
draft, the questions. The target's own next token after k draft tokens is read at row k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_parse.core.layout import RequestLayout
from sglang_parse.engine.batch import sequence_slice


@dataclass(frozen=True, slots=True)
class VerifyRows:
    """One request's part of the pass.

    Attributes:
        row: index of the request in the scheduler's batch.
        layout: its rows.
        token_ids: [layout.num_rows] input ids.
        logits_rows: rows of this request whose logits are needed, cut rows first.
        num_cut_rows: how many of them are cut rows; the rest are verdict rows.
    """

    row: int
    layout: RequestLayout
    token_ids: list[int]
    logits_rows: tuple[int, ...]
    num_cut_rows: int

    @property
    def cut_rows(self) -> tuple[int, ...]:
        """Row k is where the target's next token after k draft tokens is read."""
        return self.logits_rows[: self.num_cut_rows]


def continuing_rows(row: int, req: Any) -> VerifyRows:
    """A request that only continues: its anchor, one row."""
    return proposed_rows(row, req, ())


def proposed_rows(row: int, req: Any, proposed: Sequence[int]) -> VerifyRows:
    """A request whose target is accelerated: its anchor and ``proposed``, logits at all of them."""
    num_rows = 1 + len(proposed)
    layout = RequestLayout(prefix_len=req.parse_state.committed_len, num_draft_rows=num_rows)
    ids = [req.parse_state.output_ids[-1], *proposed]
    return VerifyRows(row, layout, ids, tuple(range(num_rows)), num_rows)


def verifying_rows(row: int, req: Any, *, semantic: bool) -> VerifyRows:
    """A request whose draft is judged: as far as its last prefix.

    Logits are needed wherever the target may write on, which is behind the anchor and behind every
    token, and at every question's last row.
    """
    committed = req.parse_state.committed_len
    draft = req.parse_state.draft
    num_draft_rows = 1 + draft.num_judged
    layout = RequestLayout(
        prefix_len=committed,
        num_draft_rows=num_draft_rows,
        visible_lens=tuple(end + 1 for end in draft.prefix_ends) if semantic else (),
        question_lens=tuple(map(len, draft.question_ids)) if semantic else (),
    )
    ids = sequence_slice(req, committed, committed + num_draft_rows, draft.token_ids)
    for question in draft.question_ids:
        ids.extend(question)
    cut_rows = tuple(range(num_draft_rows))
    return VerifyRows(row, layout, ids, cut_rows + layout.verdict_rows, len(cut_rows))
