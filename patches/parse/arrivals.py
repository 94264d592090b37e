"""PARSE sees a request before SGLang looks up its prompt in the radix cache (ledger: arrivals)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_parse.algorithm import is_parse
from sglang_parse.context import process_context
from sglang_parse.patches.base import Patch, around


def _receive(original: Callable, self: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    if is_parse(self.spec_algorithm):
        process_context().running_pipeline().receive(req)
    original(self, req, *args, **kwargs)


PATCH = Patch(
    "arrivals",
    {"sglang.srt.managers.scheduler.Scheduler._add_request_to_queue": around(_receive)},
    why="SGLang matches a prompt against the radix cache before its worker sees the request. With "
    "an EAGLE-3 head, PARSE must decide before that whether the head runs for the request: a "
    "request that uses the head must not reuse a prefix whose KV the head has not written.",
    how="on PARSE servers, the request's policy (`Req.parse_policy`) is set before it joins the "
    "waiting queue; requests without the head get a prefix in their `extra_key`, with which SGLang "
    "separates cached prefixes. Other servers call the original.",
    removed_when="a worker is notified when a request arrives.",
)
