"""An event of a stream brings a token or the end (ledger: empty_events)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_parse.algorithm import is_parse
from sglang_parse.patches.base import Patch, around

_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer"


def _accept_news(original: Callable, self: Any, *, req: Any) -> None:
    is_sent = len(req.output_ids) == req.send_token_offset and not req.finished()
    if not (is_sent and is_parse(self.spec_algorithm)):
        original(self, req=req)


PATCH = Patch(
    "empty_events",
    {f"{_STREAMER}._GenerationStreamAccumulator.accept": around(_accept_news)},
    why="SGLang sends an event for every iteration of a streamed request. While PARSE drafts, an "
    "iteration brings no token: most events of a stream had none.",
    how="on PARSE servers, a request whose tokens are all sent is left out until it has more, or "
    "ends. Other servers call the original.",
    removed_when="SGLang sends no event without a token.",
)
