"""Releasing GPU memory is refused, with the reason (ledger: memory_release)."""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_parse.algorithm import NAME
from sglang_parse.patches.base import Hook, hook_patch

_MANAGER = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"


def _refuse(manager: Any, *_: Any, **__: Any) -> None:
    """Raises: ValueError, which SGLang's HTTP server turns into an error response."""
    if (manager.server_args.speculative_algorithm or "").upper() == NAME:
        raise ValueError(
            "PARSE: memory cannot be released and resumed: SGLang would bring back the target's "
            "state only, and the draft would write garbage. Fix: end the server and start it "
            "again, or serve without --speculative-algorithm PARSE"
        )


PATCH = hook_patch(
    "memory_release",
    {
        f"{_MANAGER}.release_memory_occupation": Hook(_refuse, HookType.BEFORE, ("self", "obj")),
        f"{_MANAGER}.resume_memory_occupation": Hook(_refuse, HookType.BEFORE, ("self", "obj")),
    },
    why="SGLang saves and restores the buffers of the target only; the draft would write "
    "garbage afterwards.",
    how="for PARSE servers, both calls end in an error that says so.",
    removed_when="SGLang keeps the state of draft models too.",
)
