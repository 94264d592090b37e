"""One forward under PARSE's layout: a target verify pass, or a parallel draft forward.

Each request contributes its rows (``RequestRows``). The KV of every row goes into the request's own
slots; logits are computed for the rows that need them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)

from sglang_parse.attention.spec_input import ParseVerifyInput, forward_mode_of
from sglang_parse.core.layout import RequestLayout, VerifyLayout
from sglang_parse.core.mask import flat_mask
from sglang_parse.core.phases import Action
from sglang_parse.device import on_device
from sglang_parse.engine.batch import max_forward_rows, select_requests, slots_of, spans_within
from sglang_parse.engine.judge.scorer import hidden_states_of
from sglang_parse.engine.requests import sequence_slice
from sglang_parse.engine.sglang_types import Req, ScheduleBatch

MAX_LOGITS_BYTES = 2**30
"""Logits of one forward at most, in fp32: SGLang reserves memory for a prefill chunk, which has
logits of each request's last row only. 1,766 rows of 152,000 tokens keep a GPU busy."""


NOT_KNOWN = 0
"""In place of a token that only the device has yet."""


@dataclass(frozen=True, slots=True)
class RequestRows:
    """Rows of one request in a forward.

    A draft of 4 tokens behind 10 with KV, asked about after 2 and after 4 by questions of 3 tokens:
    rows 0 to 4 are the anchor and the draft, 5 to 7 and 8 to 10 the questions. Logits are of
    (0, 1, 2, 3, 4, 7, 10), the first 5 of them token rows.

    Attributes:
        index: the request's, in the scheduler's batch.
        layout: positions and visibility of the rows.
        token_ids: [layout.num_rows] input ids.
        logits_rows: rows that need logits: first those whose next token is needed, then the
            questions' last rows.
        num_token_rows: how many of them are of the first kind.
        action: VERIFY or PROPOSE (a draft), or DECODE.
    """

    index: int
    layout: RequestLayout
    token_ids: Sequence[int]
    logits_rows: tuple[int, ...]
    num_token_rows: int
    action: Action = Action.DECODE

    @property
    def lag(self) -> int:
        """Rows before the anchor: tokens that a recurrent state lacks."""
        return self.logits_rows[0]

    @property
    def num_answers(self) -> int:
        """Rows whose logits answer a question."""
        return len(self.logits_rows) - self.num_token_rows

    @property
    def drafted_ids(self) -> Sequence[int]:
        """The input ids of the token rows behind the first, which is the anchor's."""
        start = self.lag + 1
        return self.token_ids[start : start + self.num_token_rows - 1]

    @property
    def token_rows(self) -> tuple[int, ...]:
        """Row k's logits give the next token after k draft tokens."""
        return self.logits_rows[: self.num_token_rows]


_ONE_ROW = RequestLayout(0, 1)


def step_rows(index: int) -> RequestRows:
    """The row of an ordinary decode step of SGLang, which knows its position and token."""
    return RequestRows(index, _ONE_ROW, (), (0,), 1)


def decode_rows(index: int, req: Req, num_anchors: int = 1) -> RequestRows:
    """The tokens that a recurrent state lacks, and the anchor behind them; without it if
    ``num_anchors`` is 0."""
    lag, committed = req.parse_state.state_lag, req.parse_state.committed_len
    layout = RequestLayout(prefix_len=committed - lag, num_draft_rows=lag + num_anchors)
    ids = sequence_slice(req, layout.prefix_len, committed + num_anchors)
    return RequestRows(index, layout, ids, (layout.num_rows - 1,), 1)


def verify_rows(index: int, req: Req) -> RequestRows:
    """The anchor, the draft up to its last prefix, candidates behind it, and the questions; before
    them the tokens that a recurrent state lacks.

    The target's choice is needed after the anchor and after every draft token, because each of them
    may be the last accepted one.
    """
    lag, draft = req.parse_state.state_lag, req.parse_state.draft
    start, compared = req.parse_state.committed_len - lag, draft.compared_ids
    compared += [NOT_KNOWN] * (draft.num_ahead - len(compared))
    num_tokens = 1 + len(compared)
    asked = [
        (lag + end + 1, ids)
        for end, ids in zip(draft.prefix_ends, draft.question_ids, strict=True)
        if ids
    ]
    layout = RequestLayout(
        prefix_len=start,
        num_draft_rows=lag + num_tokens,
        visible_lens=tuple(visible for visible, _ in asked),
        question_lens=tuple(len(question) for _, question in asked),
    )
    ids = sequence_slice(req, start, start + lag + num_tokens, compared)
    for _, question in asked:
        ids.extend(question)
    token_rows = tuple(range(lag, lag + num_tokens))
    proposed = req.parse_state.action is Action.PROPOSE
    action = Action.PROPOSE if proposed else Action.VERIFY
    return RequestRows(index, layout, ids, token_rows + layout.verdict_rows, num_tokens, action)


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """Output of one forward.

    Attributes:
        logits: [sum of len(part.logits_rows), vocab], in order; the model's next forward may
            overwrite it.
        hidden: [rows, width] captured hidden states of all rows, in separate memory; or None.
        graph: rows of the CUDA graph that was replayed; 0 without one.
    """

    logits: torch.Tensor
    hidden: torch.Tensor | None
    graph: int


def max_logits_rows(runner: Any) -> int:
    """Maximum rows with logits in one forward of the runner's model."""
    return MAX_LOGITS_BYTES // (runner.model_config.vocab_size * torch.float32.itemsize)


def forward_spans(runner: Any, parts: Sequence[RequestRows]) -> list[slice]:
    sizes = [(part.layout.num_rows, len(part.logits_rows)) for part in parts]
    return spans_within(sizes, (max_forward_rows(), max_logits_rows(runner)))


def run_forward(
    target: Any,
    batch: ScheduleBatch,
    parts: Sequence[RequestRows],
    *,
    is_masked: bool,
    capture: bool = False,
    ids: torch.Tensor | None = None,
) -> ForwardOutput:
    """Runs the target over ``parts`` and writes the KV of every row into the requests' slots.

    Args:
        target: a ``TargetModel``.
        is_masked: use the layout ``mask`` unless the rows are causal; otherwise ``alias``.
        ids: int64 [rows] input ids, where the host does not know all of them.
    """
    layout, device = VerifyLayout.of([part.layout for part in parts]), batch.device
    starts = zip(parts, layout.qo_indptr[:-1], strict=True)
    index = on_device([start + row for part, start in starts for row in part.logits_rows], device)
    steps = next((one for one in target.step_graphs if one.fits(layout)), None)
    if steps is not None:
        view = _steps_view(batch, parts, layout)
    else:
        mask = flat_mask(layout, device) if is_masked and not layout.is_causal else None
        spec_info = ParseVerifyInput(layout=layout, custom_mask=mask, select_index=index)
        view = _batch_view(batch, parts, layout, spec_info)
    view.input_ids = view.input_ids if ids is None else ids
    forward_batch = ForwardBatch.init_new(
        view,
        target.runner,
        capture_hidden_mode=CaptureHiddenMode.FULL if capture else CaptureHiddenMode.NULL,
        return_hidden_states_before_norm=False,
    )
    # Questions share positions with later draft tokens: SGLang cannot derive them.
    forward_batch.positions = on_device(layout.positions(), device)
    if forward_batch.mrope_positions is not None:
        shifts = on_device(_image_shifts(batch, parts), device)
        forward_batch.mrope_positions = (forward_batch.positions + shifts).expand(3, -1)
    if steps is not None:
        output, graph = steps.run(forward_batch, index)
    elif layout.is_causal and (whole := target.graphs_of(forward_batch)) is not None:
        output, graph = whole.run(forward_batch)
    else:
        done = target.runner.forward(forward_batch)
        output = done.logits_output
        sizes = (size for size in graph_sizes(target.runner) if size >= layout.num_rows)
        graph = next(sizes, 0) if done.can_run_graph else 0
    # The next replay of SGLang's CUDA graph writes to the same memory.
    hidden = hidden_states_of(output, copied=True) if capture else None
    return ForwardOutput(output.next_token_logits, hidden, graph)


def _image_shifts(batch: ScheduleBatch, parts: Sequence[RequestRows]) -> list[int]:
    """[rows] how far positions of three axes are from a row's, behind a prompt's images."""
    inputs = batch.multimodal_inputs or [None] * len(batch.reqs)
    of_parts = ((inputs[part.index], part.layout.num_rows) for part in parts)
    return [
        int(one.mrope_position_delta) if one else 0 for one, count in of_parts for _ in range(count)
    ]


def graph_sizes(runner: Any) -> Sequence[int]:
    """Rows of the CUDA graphs of the runner's prefills, ascending."""
    return getattr(runner.prefill_cuda_graph_runner, "capture_num_tokens", ())


def _batch_view(
    batch: ScheduleBatch,
    parts: Sequence[RequestRows],
    layout: VerifyLayout,
    spec_info: ParseVerifyInput,
) -> ScheduleBatch:
    view = _rows_view(batch, parts, layout, [(part.index, part.layout.kv_len) for part in parts])
    view.extend_lens = [r.num_rows for r in layout.requests]
    view.prefix_lens = [r.prefix_len for r in layout.requests]
    view.extend_num_tokens = layout.num_rows
    # For adapters of the LM head: how many of a request's rows have logits.
    view.extend_logprob_start_lens = [p.layout.num_rows - len(p.logits_rows) for p in parts]
    view.forward_mode = forward_mode_of(layout)
    view.spec_info = spec_info
    return view


def _steps_view(
    batch: ScheduleBatch, parts: Sequence[RequestRows], layout: VerifyLayout
) -> ScheduleBatch:
    """Each causal row as a decode step of a request of its own, behind the rows before it."""
    rows = [(part.index, 1 + end) for part in parts for end in part.layout.positions()]
    view = _rows_view(batch, parts, layout, rows)
    view.forward_mode, view.spec_info = ForwardMode.DECODE, None
    return view


def _rows_view(
    batch: ScheduleBatch,
    parts: Sequence[RequestRows],
    layout: VerifyLayout,
    sequences: Sequence[tuple[int, int]],
) -> ScheduleBatch:
    """A copy with the parts' rows.

    Args:
        sequences: of the forward, each a request's index in the batch and the tokens of it, new
            rows included.
    """
    indices, seq_lens = zip(*sequences, strict=True)
    ids = [token for part in parts for token in part.token_ids]
    view = select_requests(batch, indices, seq_lens, ids)
    spans = [(one.prefix_len, one.kv_len) for one in layout.requests]
    reqs = [batch.reqs[part.index] for part in parts]
    view.out_cache_loc = slots_of(batch.req_to_token_pool, reqs, spans)
    view.multimodal_inputs = [None] * len(sequences)  # no row is of an image
    return view
