"""``torch_native`` attention for stock speculation on a CPU (ledger: draft_steps_cpu)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.runtime_context import attention_backends

from sglang_parse.attention.native import AttentionPart, MaskedTorchNativeBackend
from sglang_parse.attention.registry import is_registered, register_backends
from sglang_parse.attention.support import ON_CPU
from sglang_parse.patches.base import Patch, Registration, around

_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory"


class DraftStepsBackend:
    """The result of ``DraftBackendFactory.create_decode_backend``: one backend per step.

    Columns of a request's row while SGLang drafts, with L committed tokens, K branches, S steps:

        [0, L)                    committed tokens; every branch attends to them
        [L + k*S, L + (k+1)*S)    branch k: step i writes column i and attends up to it
    """

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


def _is_native(factory: Any) -> bool:
    chosen = factory.draft_attn_backend
    return ({chosen} if chosen else set(attention_backends())) == {ON_CPU}


def _decode_backend(original: Callable, self: Any) -> Any:
    if not _is_native(self) or self.speculative_num_steps <= 1:
        return original(self)
    return DraftStepsBackend(self.draft_model_runner, self.topk, self.speculative_num_steps)


def _draft_extend_backend(original: Callable, self: Any) -> Any:
    return MaskedTorchNativeBackend(self.draft_model_runner) if _is_native(self) else original(self)


PATCH = Patch(
    "draft_steps_cpu",
    {
        f"{_FACTORY}.create_decode_backend": around(_decode_backend),
        f"{_FACTORY}.create_draft_extend_backend": around(_draft_extend_backend),
        "sglang.srt.layers.attention.attention_registry.ATTENTION_BACKENDS": Registration(
            partial(register_backends, ON_CPU), partial(is_registered, ON_CPU)
        ),
    },
    why="`torch_native` attention supports neither draft trees nor the decode steps that grow one.",
    how="`register_attention_backend` replaces it with a subclass that adds both, "
    "`sglang_parse.attention.native`; the factory creates the backends of the draft's steps from "
    "it. Only on machines without an accelerator; others are created by the original.",
    removed_when="`torch_native` supports speculation.",
)
