"""Results in the form that SGLang's result processor slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_parse.attention.spec_input import ParseDraftInput
from sglang_parse.device import on_device
from sglang_parse.engine.logits.logprobs import TokenLogprobs, write_logprobs
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
            logits_output=LogitsProcessorOutput(next_token_logits=None),
        )
        self._event = event

    def fill(
        self,
        batch: ScheduleBatch,
        emitted: Sequence[Sequence[int]],
        logprobs: Mapping[int, Sequence[TokenLogprobs]],
    ) -> None:
        """Pads the output tokens to one stride.

        Args:
            emitted: per request of the batch its output tokens.
            logprobs: by index of a request that asks for them, those of its tokens.
        """
        lens = [len(tokens) for tokens in emitted]
        stride = max(1, *lens)
        if batch.return_logprob:
            kept = {i: tokens[: lens[i]] for i, tokens in logprobs.items() if tokens}
            write_logprobs(self.logits_output, batch.reqs, kept, stride)
        flat: list[int] = []
        for tokens in emitted:
            flat.extend(tokens)
            flat.extend([0] * (stride - len(tokens)))
        self.next_token_ids = torch.tensor(flat)
        self.accept_lens = torch.tensor(lens, dtype=torch.int32)
        if not batch.enable_overlap:  # under overlap the future map has the lengths
            self.new_seq_lens = batch.seq_lens + on_device(lens, batch.seq_lens.device)
        self.speculative_num_draft_tokens = self.speculative_output_stride = stride

    def copy_to_cpu(self, **_: Any) -> None:
        """SGLang calls this when the worker returns, to start its own copy."""
        self.copy_done = self._event
