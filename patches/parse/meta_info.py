"""PARSE's figures in every response's meta_info (ledger: meta_info)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_parse.algorithm import is_parse
from sglang_parse.context import process_context
from sglang_parse.patches.base import Hook, Hooks, Patch
from sglang_parse.telemetry.metrics import response_info

_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"


def _add_parse(original: Callable, streamer: Any, reqs: list) -> dict[str, list]:
    info = original(streamer, reqs)
    if is_parse(streamer.spec_algorithm):
        counters = process_context().counters
        info["parse"] = [
            [response_info(req, counters.simulated_accept_ratio)] if req.finished() else []
            for req in reqs
        ]
        for req in filter(lambda req: req.finished(), reqs):
            counters.update(req)
    return info


_HOOKS = Hooks(
    {
        f"{_STREAMER}.build_additional_customized_info": Hook(
            _add_parse, HookType.AROUND, ("self", "reqs")
        ),
    }
)


def _streamer_class() -> Any:
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

    return SchedulerOutputStreamer


def _register() -> None:
    _HOOKS.register()
    _streamer_class().has_additional_customized_info = True


def _is_applied() -> bool:
    return _HOOKS.is_applied() and _streamer_class().has_additional_customized_info is True


PATCH = Patch(
    "meta_info",
    targets={**_HOOKS.targets, f"{_STREAMER}.has_additional_customized_info": ()},
    register=_register,
    is_applied=_is_applied,
    why="responses should say how they were made, and SGLang has no place for an algorithm's "
    "own figures.",
    how="adds `parse` to the dictionary the function returns, for PARSE servers only.",
    removed_when="an algorithm can add to `meta_info`.",
)
