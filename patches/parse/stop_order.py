"""The first stop in the accepted tokens ends a request (ledger: stop_order)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_parse.patches.base import Patch, around


def _finish_token_by_token(original: Callable, self: Any, new_accepted_len: int = 1) -> None:
    params = self.sampling_params
    has_texts = params.stop_strs or params.stop_regex_strs
    if new_accepted_len <= 1 or self.to_finish or not has_texts:
        return original(self, new_accepted_len)
    output_ids, grammar = self.output_ids, self.grammar
    try:
        for end in range(len(output_ids) - new_accepted_len + 1, len(output_ids) + 1):
            self.output_ids = output_ids[:end]
            # Its matcher has accepted all of them.
            self.grammar = grammar if end == len(output_ids) else None
            original(self, 1)
            if self.finished():
                self.finished_len = self.finished_len or end
                break
    finally:
        self.output_ids, self.grammar = output_ids, grammar


PATCH = Patch(
    "stop_order",
    {"sglang.srt.managers.schedule_batch.Req.update_finish_state": around(_finish_token_by_token)},
    why="when several tokens are accepted at once, SGLang searches all of them for each stop "
    "string in the order of the request; a stop that is later in the text but listed first wins, "
    "and the text then contains the earlier stop. PARSE accepts up to a hundred tokens at once, so "
    "this happens (found by the soak test).",
    how="for requests with stop strings or patterns, checks the accepted tokens one by one, as "
    "plain decoding would.",
    removed_when="SGLang ends a request at the first stop in the text.",
)
