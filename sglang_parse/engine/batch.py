"""SGLang's batches: views of one for forwards of our own, and results in the shapes it slices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_parse.attention.spec_input import ParseDraftInput
from sglang_parse.device import on_device


def select_requests(
    batch: Any,
    rows: Sequence[int],
    seq_lens: Sequence[int],
    input_ids: Sequence[int] | torch.Tensor,
) -> Any:
    """A shallow copy of a ``ScheduleBatch`` for a forward of some requests; the original stays.

    Slots, mode and ``spec_info`` are the caller's to set. Sampling and log probabilities are
    taken out: they happen outside the forward.

    Args:
        batch: the scheduler's batch.
        rows: [n] indices into ``batch.reqs``.
        seq_lens: [n] lengths with the new rows included.
        input_ids: the new rows' tokens, requests concatenated; if a tensor, on the device.
    """
    view = copy.copy(batch)
    view.reqs = [batch.reqs[row] for row in rows]
    view.req_pool_indices = batch.req_pool_indices[on_device(rows, batch.device)]
    view.seq_lens_cpu = torch.tensor(seq_lens)
    view.seq_lens = on_device(seq_lens, batch.device)
    view.seq_lens_sum = sum(seq_lens)
    view.orig_seq_lens = view.seq_lens.to(torch.int32)
    if not isinstance(input_ids, torch.Tensor):
        input_ids = on_device(input_ids, batch.device)
    view.input_ids = input_ids
    view.multimodal_inputs = None
    view.return_logprob = False
    view.sampling_info = None
    return view


class PendingResult(GenerationBatchResult):
    """The result of an iteration under way: filled when the iteration is read.

    SGLang reads a result after it has waited for ``copy_done``. That is where this one is read,
    if the next iteration's plan has not done so before.
    """

    def __init__(self, settle: Callable[[], None]) -> None:
        """``settle``: reads the iteration and calls ``fill``; does nothing the second time."""
        super().__init__(
            next_draft_input=ParseDraftInput(),
            # 1, the default, makes the first iteration that emits nothing crash the scheduler.
            num_non_draft_tokens_per_req=0,
        )
        self._copy_done = _CopyDone(settle)

    def fill(
        self, batch: Any, emitted: Sequence[Sequence[int]], output: LogitsProcessorOutput
    ) -> None:
        """Pad the emitted runs to one stride, as SGLang's result processor slices them."""
        if batch.return_logprob and output.next_token_logprobs is None:
            # Whoever asked for them has ended; SGLang looks for them all the same.
            output.next_token_logprobs = torch.zeros(len(batch.reqs), 1)
        lens = [len(tokens) for tokens in emitted]
        stride = max(1, *lens)
        flat: list[int] = []
        for tokens in emitted:
            flat.extend(tokens)
            flat.extend([0] * (stride - len(tokens)))
        self.logits_output = output
        self.next_token_ids = torch.tensor(flat)
        self.accept_lens = torch.tensor(lens, dtype=torch.int32)
        if not batch.enable_overlap:  # there the relay knows the lengths
            self.new_seq_lens = batch.seq_lens + on_device(lens, batch.seq_lens.device)
        self.speculative_num_draft_tokens = self.speculative_output_stride = stride

    def copy_to_cpu(self, **_: Any) -> None:
        """What SGLang calls when the worker has returned; nothing is copied yet."""
        self.copy_done = self._copy_done


class _CopyDone:
    """In the place of the event SGLang waits for before it reads a result."""

    def __init__(self, settle: Callable[[], None]) -> None:
        self._settle: Callable[[], None] | None = settle

    def synchronize(self) -> None:
        settle, self._settle = self._settle, None  # or iteration and result keep each other
        if settle is not None:
            settle()


def spread_logprobs(output: LogitsProcessorOutput, rows: Sequence[int], num_reqs: int) -> None:
    """Put the sampled rows' log probabilities at their requests' places, width 1.

    Requests under PARSE never ask for log probabilities; their places stay empty.
    """
    logprobs = torch.zeros(num_reqs, 1)
    logprobs[torch.tensor(rows), 0] = output.next_token_logprobs.float().cpu()
    output.next_token_logprobs = logprobs
    # SGLang calls .tolist() on all of these but the requested ids, which it hands on as they are.
    for name in (
        "next_token_top_logprobs_val",
        "next_token_top_logprobs_idx",
        "next_token_token_ids_logprobs_val",
    ):
        values = getattr(output, name)
        setattr(output, name, _spread(map(torch.as_tensor, values or ()), rows, num_reqs))
    requested_ids = output.next_token_token_ids_logprobs_idx
    output.next_token_token_ids_logprobs_idx = _spread(requested_ids or (), rows, num_reqs)


def _spread(values: Iterable[Any], rows: Sequence[int], num_reqs: int) -> list[Any] | None:
    """``values`` of ``rows`` in a list with a place for every request; None if there are none."""
    places = dict(zip(rows, values, strict=False))
    return [places.get(i, torch.empty(0)) for i in range(num_reqs)] if places else None
