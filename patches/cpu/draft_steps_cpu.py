"""``torch_native`` attention for stock speculation on a CPU (ledger: draft_steps_cpu)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.runtime_context import attention_backends

from sglang_parse.attention.support import ON_CPU
from sglang_parse.patches.base import Patch, Registration, around, on_cpu_only

_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory"


def _is_native(factory: Any) -> bool:
    chosen = factory.draft_attn_backend
    return ({chosen} if chosen else set(attention_backends())) == {ON_CPU}


def _decode_backend(original: Callable, self: Any) -> Any:
    if not _is_native(self) or self.speculative_num_steps <= 1:
        return original(self)
    from sglang_parse.attention.draft_steps import DraftStepsBackend

    return DraftStepsBackend(self.draft_model_runner, self.topk, self.speculative_num_steps)


def _draft_extend_backend(original: Callable, self: Any) -> Any:
    if not _is_native(self):
        return original(self)
    from sglang_parse.attention.native import MaskedTorchNativeBackend

    return MaskedTorchNativeBackend(self.draft_model_runner)


def _put() -> None:
    from sglang_parse.attention.registry import register_backends

    register_backends(ON_CPU)


def _is_put() -> bool:
    from sglang_parse.attention.registry import is_registered

    return is_registered(ON_CPU)


PATCH = Patch(
    "draft_steps_cpu",
    {
        f"{_FACTORY}.create_decode_backend": around(_decode_backend),
        f"{_FACTORY}.create_draft_extend_backend": around(_draft_extend_backend),
        "sglang.srt.layers.attention.attention_registry.ATTENTION_BACKENDS": Registration(
            _put, _is_put
        ),
    },
    why="`torch_native` attention supports neither draft trees nor the decode steps that grow one.",
    how="`register_attention_backend` replaces it with a subclass that adds both, "
    "`sglang_parse.attention.native`; the factory creates the backends of the draft's steps from "
    "it. Only on machines without an accelerator; others are created by the original.",
    removed_when="`torch_native` supports speculation.",
    is_needed=on_cpu_only,
)
