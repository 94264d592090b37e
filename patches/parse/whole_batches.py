"""No request leaves the batch before its result says so (ledger: whole_batches)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_parse.algorithm import is_parse
from sglang_parse.patches.base import hook_patch


def _finishing_inflight(original: Callable, scheduler: Any, batch: Any) -> list:
    if is_parse(scheduler.spec_algorithm):
        return []
    return original(scheduler, batch)


PATCH = hook_patch(
    "whole_batches",
    {
        "sglang.srt.managers.scheduler.Scheduler._reqs_finishing_inflight": (
            _finishing_inflight,
            HookType.AROUND,
        )
    },
)
