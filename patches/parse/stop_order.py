"""Of several stops inside one accepted run, the first in the text ends it (ledger: stop_order)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_parse.patches.base import Hook, hook_patch


def _finish_token_token_mode(original: Callable, req: Any, new_accepted_len: int = 1) -> None:
    params = req.sampling_params
    has_texts = params.stop_strs or params.stop_regex_strs
    if new_accepted_len <= 1 or req.to_finish or not has_texts:
        return original(req, new_accepted_len)
    whole = req.output_ids
    try:
        for end in range(len(whole) - new_accepted_len + 1, len(whole) + 1):
            req.output_ids = whole[:end]
            original(req, 1)
            if req.finished():
                # As after a single step, where no token lies behind the end.
                req.finished_len = req.finished_len or end
                break
    finally:
        req.output_ids = whole


PATCH = hook_patch(
    "stop_order",
    {
        "sglang.srt.managers.schedule_batch.Req.update_finish_state": Hook(
            _finish_token_token_mode, HookType.AROUND, ("self", "new_accepted_len")
        ),
    },
    why="when several tokens are accepted at once, SGLang looks for the stop strings in the "
    "order the request names them, in the whole run; a later one in the text that is "
    "named first wins, and the text then holds the earlier stop. A run of PARSE's has up "
    "to a hundred tokens, so this happens (found by `make soak`).",
    how="a run with stop strings or patterns is looked at token by token, as plain decoding would.",
    removed_when="SGLang ends a run at the first stop in the text.",
)
