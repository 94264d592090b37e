"""``torch_native`` attention for speculation on a CPU (ledger: draft_steps_cpu)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_parse.patches.base import Hook, Hooks, Patch, on_cpu_only

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


_HOOKS = Hooks(
    {
        f"{_FACTORY}.create_decode_backend": Hook(_decode_backend, HookType.AROUND, ("self",)),
        f"{_FACTORY}.create_draft_extend_backend": Hook(
            _draft_extend_backend, HookType.AROUND, ("self",)
        ),
    }
)


def _register() -> None:
    # SGLang's own registry, ATTENTION_BACKENDS.
    from sglang_parse.attention.registry import register_backends

    _HOOKS.register()
    register_backends("torch_native")


def _is_applied() -> bool:
    from sglang_parse.attention.registry import is_registered

    return _HOOKS.is_applied() and is_registered("torch_native")


PATCH = Patch(
    "draft_steps_cpu",
    targets={
        **_HOOKS.targets,
        "sglang.srt.layers.attention.attention_registry.ATTENTION_BACKENDS": (),
    },
    register=_register,
    is_applied=_is_applied,
    why="`torch_native` attention has no mask for draft trees and no form for the steps that "
    "grow one.",
    how="`register_attention_backend` puts `sglang_parse.attention.native` in its place, a "
    "subclass that does the rest as before; the factory makes the backends of the draft's "
    "steps from it. Only on machines without an accelerator; other attention backends "
    "are made by the original.",
    removed_when="`torch_native` serves speculation.",
    is_needed=on_cpu_only,
)
