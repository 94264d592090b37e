"""One target forward that judges drafts and carries the requests that only continue.

Per verifying request the rows are: the anchor (the last output token, whose KV is not written
yet), the draft, the questions. The target's own next token after k draft tokens is read at row k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.runtime_context import get_schedule

from sglang_parse.attention.spec_input import VERIFY_MODE, ParseVerifyInput
from sglang_parse.core.layout import RequestLayout, VerifyLayout
from sglang_parse.core.mask import flat_mask
from sglang_parse.core.question import Question
from sglang_parse.core.request import Draft
from sglang_parse.core.segment import SegmentRule, prefix_ends
from sglang_parse.device import on_device
from sglang_parse.engine.batch import select_requests
from sglang_parse.engine.kv import sequence_slice


def plan_questions(
    draft: Draft,
    pieces: Sequence[str],
    rule: SegmentRule,
    question: Question,
    max_prefixes: int,
    *,
    was_thinking: bool,
) -> None:
    """Fill ``prefix_ends`` and ``question_ids`` of a draft that is over.

    Args:
        draft: the draft; ``pieces`` is the decoded text of each of its tokens.
        rule, max_prefixes: see ``segment.prefix_ends``.
        question: the rendered question; the end of a finished draft gets its ``complete`` form.
        was_thinking: a think block is open before the draft.
    """
    draft.prefix_ends = prefix_ends(
        pieces, rule, finished=draft.finished, max_prefixes=max_prefixes
    )
    draft.question_ids = [
        question.ids_for(
            draft.token_ids[:end],
            complete=draft.finished and end == len(draft.token_ids),
            was_thinking=was_thinking,
            ends_line=pieces[end - 1].endswith("\n"),
        )
        for end in draft.prefix_ends
    ]


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
    """A request whose draft is judged.

    In semantic mode logits are needed at every cut (row 0: nothing kept) and every question's
    last row; in token mode at the anchor and every draft token.
    """
    committed = req.parse_state.committed_len
    draft = req.parse_state.draft
    num_draft_rows = 1 + len(draft.token_ids)
    layout = RequestLayout(
        prefix_len=committed,
        num_draft_rows=num_draft_rows,
        cuts=tuple(end + 1 for end in draft.prefix_ends) if semantic else (),
        question_lens=tuple(map(len, draft.question_ids)) if semantic else (),
    )
    ids = sequence_slice(req, committed, committed + num_draft_rows, draft.token_ids)
    for question in draft.question_ids:
        ids.extend(question)
    cut_rows = (0, *draft.prefix_ends) if semantic else tuple(range(num_draft_rows))
    return VerifyRows(row, layout, ids, cut_rows + layout.verdict_rows, len(cut_rows))


@dataclass(frozen=True, slots=True)
class PassOutput:
    """What a pass computed, in memory of its own.

    Attributes:
        logits: [sum of len(part.logits_rows), vocab], the parts' rows in order.
        starts: per part, its first row in ``logits``; at the end, their number.
        hidden: [rows of the pass, width] what an EAGLE-3 head reads of each row, if captured.
        row_starts: per part, its first row in the pass; at the end, their number.
    """

    logits: torch.Tensor
    starts: list[int]
    hidden: torch.Tensor | None
    row_starts: Sequence[int]


def max_pass_rows() -> int:
    """Rows of one verification pass: what SGLang keeps memory free for, a chunk of prefill."""
    schedule = get_schedule()
    chunk = schedule.chunked_prefill_size or -1
    return chunk if chunk > 0 else schedule.max_prefill_tokens


def run_passes(
    target_runner: Any,
    batch: Any,
    parts: Sequence[VerifyRows],
    *,
    is_masked: bool,
    capture: bool,
    max_rows: int,
) -> list[PassOutput]:
    """``run_pass`` over ``parts`` in order: one, or as few as the memory for activations allows.

    Args:
        max_rows: of one pass; a request with more has one of its own.
    """
    passes: list[list[VerifyRows]] = [[]]
    num_rows = 0
    for part in parts:
        if passes[-1] and num_rows + part.layout.num_rows > max_rows:
            passes.append([])
            num_rows = 0
        passes[-1].append(part)
        num_rows += part.layout.num_rows
    return [
        run_pass(target_runner, batch, some, is_masked=is_masked, capture=capture)
        for some in passes
    ]


def joined(outputs: Sequence[PassOutput]) -> PassOutput:
    """Several passes' outputs as if one pass had made them."""
    if len(outputs) == 1:
        return outputs[0]
    starts, row_starts = [0], [0]
    for output in outputs:
        starts += [starts[-1] + start for start in output.starts[1:]]
        row_starts += [row_starts[-1] + start for start in output.row_starts[1:]]
    hidden = [output.hidden for output in outputs if output.hidden is not None]
    return PassOutput(
        logits=torch.cat([output.logits for output in outputs]),
        starts=starts,
        hidden=torch.cat(hidden) if hidden else None,
        row_starts=row_starts,
    )


def run_pass(
    target_runner: Any, batch: Any, parts: Sequence[VerifyRows], *, is_masked: bool, capture: bool
) -> PassOutput:
    """The target forward over ``parts``. Writes the KV of every row into the requests' slots.

    Args:
        is_masked: in the layout ``mask``, otherwise in ``alias``.
        capture: keep the hidden states of all rows.
    """
    layout = VerifyLayout.of([part.layout for part in parts])
    device = batch.device
    select: list[int] = []
    starts: list[int] = []
    for part, offset in zip(parts, layout.qo_indptr, strict=False):
        starts.append(len(select))
        select.extend(offset + row for row in part.logits_rows)
    starts.append(len(select))
    spec_info = ParseVerifyInput(
        layout=layout,
        custom_mask=flat_mask(layout, device) if is_masked else None,
        select_index=on_device(select, device),
    )
    view = _batch_view(batch, parts, layout, spec_info)
    with _without_adapters(target_runner):
        forward_batch = ForwardBatch.init_new(
            view,
            target_runner,
            capture_hidden_mode=CaptureHiddenMode.FULL if capture else CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
        )
    # Questions share positions with later draft tokens: only the layout knows them.
    forward_batch.positions = on_device(layout.positions(), device)
    output = target_runner.forward(forward_batch).logits_output
    # SGLang's graphs write a forward's numbers where the one before has left its own.
    hidden = output.hidden_states.clone() if capture else None
    return PassOutput(output.next_token_logits.clone(), starts, hidden, layout.qo_indptr)


@contextmanager
def _without_adapters(target_runner: Any) -> Iterator[None]:
    """SGLang prepares LoRA for every forward, by rows it knows; a pass has others, and no adapter.

    Not for good: a CUDA graph that is captured meanwhile would be one without adapters for all.
    """
    if target_runner.lora_manager is None:
        yield
        return
    backend = target_runner.lora_manager.lora_backend
    backend.skip_inactive_lora_batches = True
    try:
        yield
    finally:
        backend.skip_inactive_lora_batches = False


def _batch_view(
    batch: Any, parts: Sequence[VerifyRows], layout: VerifyLayout, spec_info: ParseVerifyInput
) -> Any:
    """The pass's requests with all their rows."""
    rows = [part.row for part in parts]
    ids = [token for part in parts for token in part.token_ids]
    view = select_requests(batch, rows, [r.kv_len for r in layout.requests], ids)
    view.out_cache_loc = _slots(batch, view.reqs, layout)
    view.extend_lens = [r.num_rows for r in layout.requests]
    view.prefix_lens = [r.prefix_len for r in layout.requests]
    view.extend_num_tokens = layout.num_rows
    view.extend_logprob_start_lens = view.extend_lens
    view.forward_mode = VERIFY_MODE
    view.spec_info = spec_info
    return view


def _slots(batch: Any, reqs: Sequence[Any], layout: VerifyLayout) -> torch.Tensor:
    """int64 [layout.num_rows] KV slot of every row: the tails of the requests' rows."""
    table = batch.req_to_token_pool.req_to_token
    parts = [
        table[req.kv.req_pool_idx, r.prefix_len : r.kv_len]
        for req, r in zip(reqs, layout.requests, strict=True)
    ]
    return torch.cat(parts).to(torch.int64)
