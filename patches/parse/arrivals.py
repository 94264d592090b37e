"""How a request is served is decided before its prompt is looked up (ledger: arrivals)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_parse.algorithm import is_parse
from sglang_parse.context import process_context
from sglang_parse.patches.base import Hook, hook_patch


def _receive(original: Callable, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    if is_parse(scheduler.spec_algorithm):
        process_context().running_pipeline().receive(req)
    original(scheduler, req, *args, **kwargs)


PATCH = hook_patch(
    "arrivals",
    {
        "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue": Hook(
            _receive, HookType.AROUND, ("self", "req")
        ),
    },
    why="SGLang looks a prompt up in the radix cache before its worker hears of the request. "
    "Beside an EAGLE-3 head it has to be known by then whether the head reads along: KV without "
    "the head's must not be found by requests that go on with it.",
    how="on PARSE servers, before a request waits for its prefill, what it is promised is written "
    "down (`Req.parse_policy`); those that the head does not read get an `extra_key` in front of "
    "their own, SGLang's way to keep prefixes apart. Other servers call the original.",
    removed_when="a worker is told of requests when they arrive.",
)
