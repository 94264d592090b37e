"""A verification pass: one target forward that judges drafts and carries those who only continue.

``Verifier.launch`` sends it off and has it measured on the device; ``LaunchedPass.read`` waits for
the few numbers per request that ``rounds`` decides by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.runtime_context import get_schedule

from sglang_parse.attention.spec_input import VERIFY_MODE, ParseVerifyInput
from sglang_parse.core.layout import VerifyLayout
from sglang_parse.core.mask import flat_mask
from sglang_parse.core.question import Question
from sglang_parse.device import on_device
from sglang_parse.engine.batch import select_requests, slots_of
from sglang_parse.engine.readout import Measured, Spoken
from sglang_parse.engine.rows import (
    VerifyRows,
    continuing_rows,
    proposed_rows,
    verifying_rows,
)
from sglang_parse.engine.sampling import RowSampler
from sglang_parse.engine.steps import Steps, choose_steps
from sglang_parse.engine.target import PlainTarget


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

    def split(self, *counts: int) -> list[torch.Tensor]:
        """The logits of the first ``counts[0]`` parts, of the next ``counts[1]``, of the rest."""
        ends = [self.starts[sum(counts[: i + 1])] for i in range(len(counts))]
        return list(torch.tensor_split(self.logits, ends))


@dataclass(frozen=True, slots=True)
class LaunchedPass:
    """A pass under way.

    Attributes:
        output: what it computes.
        parts: the rows of everyone in it: ``judged``, then ``checked``, then who continues.
        judged, checked: the readings of the first two.
        proposals: by row of the batch, what an EAGLE-3 head proposed.
        steps: those who wrote one token, in the pass or beside it; None if nobody did.
        num_passes: target forwards it is made of.
    """

    output: PassOutput
    parts: Sequence[VerifyRows]
    judged: Measured
    checked: Measured
    proposals: Mapping[int, Sequence[int]]
    steps: Steps | None
    num_passes: int

    @property
    def hidden(self) -> torch.Tensor | None:
        return self.output.hidden

    @property
    def num_rows(self) -> int:
        return self.output.row_starts[-1]

    @property
    def rows_of(self) -> list[tuple[int, int]]:
        """(row of the batch, how many rows of the pass are its own) of everyone in it."""
        return [(part.row, part.layout.num_rows) for part in self.parts]

    @property
    def writing(self) -> list[int]:
        """Rows of the batch that write on without a draft, in the pass or beside it."""
        return [*self.proposals, *(self.steps.rows if self.steps else ())]

    @property
    def places(self) -> list[tuple[int, int]]:
        """(row of the batch, its first row of the pass) of everyone in it."""
        starts = self.output.row_starts[:-1]
        return [(part.row, start) for part, start in zip(self.parts, starts, strict=True)]

    def read(self) -> Spoken:
        """Wait for its numbers."""
        checked = [
            (part.row, self.proposals[part.row], readout)
            for part, readout in self.checked.readouts()
        ]
        steps = self.steps.read() if self.steps else ()
        return Spoken(self.judged.readouts(), checked, steps)


class Verifier:
    """Runs the verification passes of one server's target.

    Args:
        target: the target.
        question: what is asked; None in token mode.
        is_masked: in the layout ``mask``, otherwise in ``alias``.
        capture: keep the hidden states of all rows, for an EAGLE-3 head.
    """

    def __init__(
        self, target: PlainTarget, question: Question | None, *, is_masked: bool, capture: bool
    ) -> None:
        self.target, self.question = target, question
        self.is_masked, self.capture = is_masked, capture

    def launch(
        self,
        batch: Any,
        verifying: Sequence[int],
        proposals: Mapping[int, Sequence[int]],
        stepping: Sequence[int],
    ) -> LaunchedPass:
        """One pass: drafts are judged, the others' next tokens ride along.

        But for requests with an adapter: SGLang's LoRA kernels know no ragged verification rows,
        so these take a decode step of their own.

        Args:
            batch: the scheduler's batch.
            verifying: rows of the requests whose drafts are judged.
            proposals: by row, an EAGLE-3 head's proposals to check.
            stepping: rows of the requests that write one token.
        """
        reqs, semantic = batch.reqs, self.question is not None
        judged = [verifying_rows(i, reqs[i], semantic=semantic) for i in verifying]
        checked = [proposed_rows(i, reqs[i], tokens) for i, tokens in proposals.items()]
        riding = [i for i in stepping if not reqs[i].lora_id]
        alone = [i for i in stepping if reqs[i].lora_id]
        parts = [*judged, *checked, *(continuing_rows(i, reqs[i]) for i in riding)]
        options = {"is_masked": self.is_masked, "capture": self.capture}
        runner = self.target.runner
        passes = run_passes(runner, batch, parts, max_rows=max_pass_rows(), **options)
        output = joined(passes)
        of_judged, of_checked, of_riding = output.split(len(judged), len(checked))
        sampler = RowSampler(runner, batch)
        return LaunchedPass(
            output=output,
            parts=parts,
            judged=Measured(judged, of_judged, sampler, self.question),
            checked=Measured(checked, of_checked, sampler, None),
            proposals=proposals,
            steps=self._steps(batch, riding, alone, of_riding) if stepping else None,
            num_passes=len(passes),
        )

    def _steps(
        self, batch: Any, riding: Sequence[int], alone: Sequence[int], logits: torch.Tensor
    ) -> Steps:
        """``logits``: [len(riding), vocab] of those who ride along in the pass."""
        if alone:
            logits = torch.cat([logits, self.target.decode(batch, alone).next_token_logits])
        return choose_steps(self.target.runner, batch, [*riding, *alone], logits)


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
    for part, offset in zip(parts, layout.qo_indptr[:-1], strict=True):
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
    spans = [(r.prefix_len, r.kv_len) for r in layout.requests]
    view.out_cache_loc = slots_of(batch, view.reqs, spans)
    view.extend_lens = [r.num_rows for r in layout.requests]
    view.prefix_lens = [r.prefix_len for r in layout.requests]
    view.extend_num_tokens = layout.num_rows
    view.extend_logprob_start_lens = view.extend_lens
    view.forward_mode = VERIFY_MODE
    view.spec_info = spec_info
    return view
