"""The target's next tokens for requests that write one at a time: chosen, and on their way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_parse.device import HostCopy, on_device
from sglang_parse.engine.broadcast import broadcast_tokens
from sglang_parse.engine.faults import nan_rows
from sglang_parse.engine.sampling import RowSampler


@dataclass(frozen=True, slots=True)
class Steps:
    """One token of the target for some requests.

    Attributes:
        rows: [n] their rows of the batch.
        tokens: int64 [n] on the device, ``broadcast.NO_TOKEN`` where the logits held a NaN.
        on_host: the same on their way to the host.
        output: the sampler's record.
        has_logprobs: whether it holds log probabilities.
    """

    rows: Sequence[int]
    tokens: torch.Tensor
    on_host: HostCopy
    output: LogitsProcessorOutput
    has_logprobs: bool

    def read(self) -> list[tuple[int, int]]:
        """[n] (row, token); waits for them."""
        return list(zip(self.rows, self.on_host.tolist(), strict=True))


def choose_steps(runner: Any, batch: Any, rows: Sequence[int], logits: torch.Tensor) -> Steps:
    """Choose one token per request.

    Args:
        runner: the target's model runner, whose sampler is used.
        batch: the scheduler's batch.
        rows: [n] indices into its requests.
        logits: [n, vocab] of their last tokens; overwritten.
    """
    positions = on_device(  # of the input tokens
        [batch.reqs[row].parse_state.committed_len for row in rows], batch.device
    )
    is_bad = nan_rows(logits)
    want_logprob = batch.return_logprob and any(batch.reqs[i].return_logprob for i in rows)
    sampler = RowSampler(runner, batch)
    tokens, output = sampler.sample(logits, rows, positions, return_logprob=want_logprob)
    shared = broadcast_tokens(tokens, is_bad)
    return Steps(rows, shared, HostCopy(shared), output, want_logprob)
