"""``torch_native`` attention for speculation on a CPU (ledger: draft_steps_cpu)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_parse.patches.base import Patch, hook_patch, on_cpu_only

_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory"


def _is_native(factory: Any) -> bool:
    from sglang.srt.runtime_context import attention_backends

    from sglang_parse.attention.support import ON_CPU

    chosen = factory.draft_attn_backend
    return ({chosen} if chosen else set(attention_backends())) == {ON_CPU}


def _decode_backend(original: Callable, factory: Any) -> Any:
    if not _is_native(factory) or factory.speculative_num_steps <= 1:
        return original(factory)
    from sglang_parse.attention.draft_steps import DraftStepsBackend

    return DraftStepsBackend(
        factory.draft_model_runner, factory.topk, factory.speculative_num_steps
    )


def _draft_extend_backend(original: Callable, factory: Any) -> Any:
    if not _is_native(factory):
        return original(factory)
    from sglang_parse.attention.native import MaskedTorchNativeBackend

    return MaskedTorchNativeBackend(factory.draft_model_runner)


_HOOKS = hook_patch(
    "draft_steps_cpu",
    {
        f"{_FACTORY}.create_decode_backend": (_decode_backend, HookType.AROUND),
        f"{_FACTORY}.create_draft_extend_backend": (_draft_extend_backend, HookType.AROUND),
    },
)


def _register() -> None:
    # SGLang's own registry, ATTENTION_BACKENDS.
    from sglang_parse.attention.registry import register_backends

    _HOOKS.register()
    register_backends("torch_native")


def _is_applied() -> bool:
    from sglang_parse.attention.registry import is_registered

    return _HOOKS.is_applied() and is_registered("torch_native")


PATCH = Patch("draft_steps_cpu", _register, _is_applied, on_cpu_only)
