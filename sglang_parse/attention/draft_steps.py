"""Attention of a draft tree's decode steps on the CPU, one backend per step.

Columns of a request's row while SGLang drafts, with L committed tokens, K branches, S steps:

    [0, L)                    committed tokens; every branch attends to them
    [L + k*S, L + (k+1)*S)    branch k: step i writes column i and attends up to it
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_parse.attention.native import AttentionPart, MaskedTorchNativeBackend


class DraftStepsBackend:
    """The result of ``DraftBackendFactory.create_decode_backend``."""

    def __init__(self, model_runner: Any, topk: int, num_steps: int) -> None:
        """``num_steps``: draft tokens per branch; the first needs no decode step."""
        self.topk, self.num_steps = topk, num_steps
        self.attn_backends = [MaskedTorchNativeBackend(model_runner) for _ in range(num_steps - 1)]
        self._req_to_token = model_runner.req_to_token_pool.req_to_token

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plans all steps of one draft; ``seq_lens`` are the committed tokens."""
        branches = [
            (length, slots)
            for request, length in zip(
                forward_batch.req_pool_indices, forward_batch.seq_lens.tolist(), strict=True
            )
            for slots in self._branch_slots(self._req_to_token[request], length)
        ]
        for step, backend in enumerate(self.attn_backends):
            backend.attend_in(
                [
                    AttentionPart(slice(row, row + 1), slots[: length + step + 1])
                    for row, (length, slots) in enumerate(branches)
                ]
            )

    def _branch_slots(self, row: torch.Tensor, length: int) -> list[torch.Tensor]:
        """Returns each branch's slots: the committed tokens' and its own."""
        own = row[length : length + self.topk * self.num_steps].view(self.topk, self.num_steps)
        return [torch.cat((row[:length], columns)) for columns in own]
