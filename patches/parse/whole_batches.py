"""No request leaves the batch before its result says so (ledger: whole_batches)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_parse.algorithm import is_parse
from sglang_parse.patches.base import Hook, hook_patch


def _finishing_inflight(original: Callable, scheduler: Any, batch: Any) -> list:
    if is_parse(scheduler.spec_algorithm):
        return []
    return original(scheduler, batch)


PATCH = hook_patch(
    "whole_batches",
    {
        "sglang.srt.managers.scheduler.Scheduler._reqs_finishing_inflight": Hook(
            _finishing_inflight, HookType.AROUND, ("self", "batch")
        ),
    },
    why="under overlap SGLang takes a request out of the next batch when the result under way "
    "will bring its last token, on the assumption that every result brings one. While "
    "PARSE drafts it brings none, and the request would be lost.",
    how="for PARSE nobody is taken out; a request whose answer is over waits one iteration. "
    "Others call the original.",
    removed_when="an algorithm can say which requests end with what is under way.",
)
