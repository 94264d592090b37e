"""LoRA adapters on a PARSE server (ledger: lora_admitted)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.overrides import resolving_view

from sglang_parse.algorithm import NAME
from sglang_parse.patches.base import Patch, around


def _check(original: Callable, server_args: Any) -> None:
    if resolving_view(server_args).speculative_algorithm != NAME:
        original(server_args)


PATCH = Patch(
    "lora_admitted",
    {"sglang.srt.arg_groups.lora_hook.check_lora_speculative_compatibility": around(_check)},
    why="SGLang admits LoRA adapters only with the speculative algorithms on its own list, whose "
    "verify rows all have one width. PARSE serves a request with an adapter by plain decode steps, "
    "never in a verify pass.",
    how="skips the check for PARSE; in verify passes the adapter layers take their plain path "
    "(`skip_inactive_lora_batches`, set while the pass is prepared).",
    removed_when="an algorithm can state that it supports adapters.",
)
