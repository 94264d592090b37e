"""One forward under PARSE's own layout: a verification pass of the target, a block of the draft.

Each request brings its rows (``rows.VerifyRows``); the KV of every row goes into the request's own
slots, and logits are computed of the rows that are named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch

from sglang_parse.attention.spec_input import VERIFY_MODE, ParseVerifyInput
from sglang_parse.core.layout import VerifyLayout
from sglang_parse.core.mask import flat_mask
from sglang_parse.device import on_device
from sglang_parse.engine.batch import (
    max_forward_rows,
    select_requests,
    slots_of,
    spans_within,
)
from sglang_parse.engine.rows import VerifyRows

MAX_LOGITS_BYTES = 2**30
"""Logits of one forward at most, in fp32. What is kept free is for a chunk of prefill, which
has logits of each request's last row alone. 1,766 rows of 152,000 tokens keep a GPU busy."""


@dataclass(frozen=True, slots=True)
class PassOutput:
    """What a pass computed.

    Attributes:
        logits: [sum of len(part.logits_rows), vocab], the parts' rows in order; SGLang's own, which
            the target's next forward may overwrite.
        starts: per part, its first row in ``logits``; at the end, their number.
        hidden: [rows of the pass, width] what an EAGLE-3 head reads of each row, if captured; in
            memory of its own.
        replays: whether a CUDA graph was replayed.
    """

    logits: torch.Tensor
    starts: list[int]
    hidden: torch.Tensor | None
    replays: bool

    def split(self, *counts: int) -> list[torch.Tensor]:
        """The logits of the first ``counts[0]`` parts, of the next ``counts[1]``, of the rest."""
        ends = [self.starts[sum(counts[: i + 1])] for i in range(len(counts))]
        return list(torch.tensor_split(self.logits, ends))


def max_logits_rows(runner: Any) -> int:
    """Rows with logits of one forward of ``runner``'s model."""
    bytes_per_row = runner.model_config.vocab_size * torch.float32.itemsize
    return MAX_LOGITS_BYTES // bytes_per_row


def forward_spans(runner: Any, parts: Sequence[VerifyRows]) -> list[slice]:
    """Which of ``parts`` go into one forward of ``runner``'s model: all, or as many as the memory
    allows, in order. Where every row has logits, as in token mode, those are what takes it."""
    sizes = [(part.layout.num_rows, len(part.logits_rows)) for part in parts]
    return spans_within(sizes, (max_forward_rows(), max_logits_rows(runner)))


def run_pass(
    runner: Any,
    batch: Any,
    parts: Sequence[VerifyRows],
    *,
    is_masked: bool,
    capture: bool = False,
) -> PassOutput:
    """A model's forward over ``parts``. Writes the KV of every row into the requests' slots.

    Args:
        runner: the model runner of the target or the draft.
        is_masked: in the layout ``mask``, if it is not causal anyway; otherwise in ``alias``.
        capture: keep the hidden states of all rows.
    """
    layout = VerifyLayout.of([part.layout for part in parts])
    device = batch.device
    select: list[int] = []
    starts: list[int] = []
    for part, offset in zip(parts, layout.qo_indptr[:-1], strict=True):
        starts.append(len(select))
        select.extend(offset + row for row in part.logits_rows)
    starts.append(len(select))
    spec_info = ParseVerifyInput(
        layout=layout,
        custom_mask=flat_mask(layout, device) if is_masked and not layout.is_causal else None,
        select_index=on_device(select, device),
    )
    view = _batch_view(batch, parts, layout, spec_info)
    with _without_adapters(runner):
        forward_batch = ForwardBatch.init_new(
            view,
            runner,
            capture_hidden_mode=CaptureHiddenMode.FULL if capture else CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
        )
    # Questions share positions with later draft tokens: only the layout knows them.
    forward_batch.positions = on_device(layout.positions(), device)
    done = runner.forward(forward_batch)
    output = done.logits_output
    # SGLang's graphs write a forward's numbers where the one before has left its own.
    hidden = output.hidden_states.clone() if capture else None
    return PassOutput(output.next_token_logits, starts, hidden, done.can_run_graph)


@contextmanager
def _without_adapters(runner: Any) -> Iterator[None]:
    """SGLang prepares LoRA for every forward, by rows it knows; a pass has others, and no adapter.

    Not for good: a CUDA graph that is captured meanwhile would be one without adapters for all.
    """
    if runner.lora_manager is None:
        yield
        return
    backend = runner.lora_manager.lora_backend
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
    spans = [(r.prefix_len, r.kv_len) for r in layout.requests]
    view.out_cache_loc = slots_of(batch, view.reqs, spans)
    view.extend_lens = [r.num_rows for r in layout.requests]
    view.prefix_lens = [r.prefix_len for r in layout.requests]
    view.extend_num_tokens = layout.num_rows
    view.extend_logprob_start_lens = view.extend_lens
    view.forward_mode = VERIFY_MODE
    view.spec_info = spec_info
    return view
