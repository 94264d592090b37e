"""A PARSE server may have LoRA adapters (ledger: lora_admitted)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_parse.patches.base import hook_patch


def _check(original: Callable, server_args: Any) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view

    if resolving_view(server_args).speculative_algorithm != "PARSE":
        original(server_args)


PATCH = hook_patch(
    "lora_admitted",
    {
        "sglang.srt.arg_groups.lora_hook.check_lora_speculative_compatibility": (
            _check,
            HookType.AROUND,
        )
    },
)
