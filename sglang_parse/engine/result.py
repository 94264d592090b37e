"""Results in the form that SGLang's result processor slices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_parse.attention.spec_input import ParseDraftInput
from sglang_parse.device import on_device
from sglang_parse.engine.sglang_types import ScheduleBatch


class PendingResult(GenerationBatchResult):
    """Result of an iteration in flight, filled when the iteration commits.

    ``can_run_cuda_graph``, for SGLang's log and metrics, is that of the iteration's last forward.

    Args:
        event: takes the place of the CUDA event that SGLang waits for before it processes a result;
            its ``synchronize`` finishes the iteration.
    """

    def __init__(self, event: Any = None) -> None:
        super().__init__(
            next_draft_input=ParseDraftInput(),
            # 1, the default, makes the first iteration that emits nothing crash the scheduler.
            num_non_draft_tokens_per_req=0,
        )
        self._event = event

    def fill(
        self, batch: ScheduleBatch, emitted: Sequence[Sequence[int]], output: LogitsProcessorOutput
    ) -> None:
        """Pads the output tokens to one stride.

        Args:
            emitted: per request of the batch its output tokens.
            output: the sampler's output; log probabilities at their requests' indices.
        """
        if batch.return_logprob and output.next_token_logprobs is None:
            # The requests that asked for them ended; SGLang accesses them all the same.
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
        if not batch.enable_overlap:  # under overlap the future map has the lengths
            self.new_seq_lens = batch.seq_lens + on_device(lens, batch.seq_lens.device)
        self.speculative_num_draft_tokens = self.speculative_output_stride = stride

    def copy_to_cpu(self, **_: Any) -> None:
        """SGLang calls this when the worker returns, to start its own copy."""
        self.copy_done = self._event


def spread_logprobs(output: LogitsProcessorOutput, rows: Sequence[int], num_reqs: int) -> None:
    """Scatters the sampled rows' log probabilities to their requests' indices, width 1."""
    logprobs = torch.zeros(num_reqs, 1)
    logprobs[torch.tensor(rows), 0] = output.next_token_logprobs.float().cpu()
    output.next_token_logprobs = logprobs
    # SGLang calls .tolist() on all of these except the requested ids.
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
