"""PARSE's figures in each response's ``meta_info`` (ledger: meta_info)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_parse.algorithm import is_parse
from sglang_parse.context import process_context
from sglang_parse.patches.base import Patch, Value, around
from sglang_parse.telemetry.metrics import response_info

_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"


def _add_parse(original: Callable, self: Any, reqs: list) -> dict[str, list]:
    info = original(self, reqs)
    if is_parse(self.spec_algorithm):
        counters = process_context().counters
        info["parse"] = [
            [response_info(req, counters.simulated_accept_ratio)] if req.finished() else []
            for req in reqs
        ]
        for req in filter(lambda req: req.finished(), reqs):
            counters.update(req)
    return info


PATCH = Patch(
    "meta_info",
    {
        f"{_STREAMER}.build_additional_customized_info": around(_add_parse),
        f"{_STREAMER}.has_additional_customized_info": Value(True),
    },
    why="responses report how they were generated, and SGLang has no place for an algorithm's "
    "figures.",
    how="adds `parse` to the returned dictionary, on PARSE servers only.",
    removed_when="an algorithm can add to `meta_info`.",
)
