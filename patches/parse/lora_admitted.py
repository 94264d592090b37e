"""A PARSE server may have LoRA adapters (ledger: lora_admitted)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_parse.patches.base import Hook, hook_patch


def _check(original: Callable, server_args: Any) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view

    if resolving_view(server_args).speculative_algorithm != "PARSE":
        original(server_args)


PATCH = hook_patch(
    "lora_admitted",
    {
        "sglang.srt.arg_groups.lora_hook.check_lora_speculative_compatibility": Hook(
            _check, HookType.AROUND, ("server_args",)
        ),
    },
    why="SGLang admits LoRA adapters only beside the speculative algorithms on its own list, "
    "whose verification rows all have one width. Under PARSE a request with an adapter is "
    "served by plain decode steps and never rides in a pass.",
    how="the check is left out for PARSE; the adapter layers take their plain path in passes "
    "(`skip_inactive_lora_batches`, set while a pass is prepared).",
    removed_when="an algorithm can say that it takes adapters.",
)
