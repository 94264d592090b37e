"""A request stays in the batch until its result ends it (ledger: whole_batches)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_parse.algorithm import is_parse
from sglang_parse.patches.base import Patch, around


def _finishing_inflight(original: Callable, self: Any, batch: Any) -> list:
    return [] if is_parse(self.spec_algorithm) else original(self, batch)


PATCH = Patch(
    "whole_batches",
    {
        "sglang.srt.managers.scheduler.Scheduler._reqs_finishing_inflight": around(
            _finishing_inflight
        )
    },
    why="under overlap SGLang removes a request from the next batch when the result in flight "
    "will bring its last token, assuming one token per result. While PARSE drafts, a result "
    "brings none, and the request would be lost.",
    how="PARSE requests are never removed early; a finished request waits one iteration. Other "
    "servers call the original.",
    removed_when="an algorithm can state which requests the result in flight ends.",
)
