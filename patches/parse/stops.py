"""The first stop in the accepted tokens ends a request, its counts and its turn (ledger: stops)."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable
from typing import Any

from sglang_parse.patches.base import Patch, around


def _finish_at_first_stop(original: Callable, self: Any, new_accepted_len: int = 1) -> None:
    if not new_accepted_len and not self.to_finish:
        return  # an iteration without a token; SGLang would search the whole output
    params = self.sampling_params
    has_texts = params.stop_strs or params.stop_regex_strs
    if new_accepted_len <= 1 or self.to_finish or not has_texts:
        original(self, new_accepted_len)
    else:
        _finish_token_by_token(original, self, new_accepted_len)
    if self.finished_len is not None:  # counted before the stop was found
        self.reasoning_tokens = min(self.reasoning_tokens, self.finished_len)


def _finish_token_by_token(original: Callable, self: Any, new_accepted_len: int) -> None:
    grammar, new_ids = self.grammar, self.output_ids[-new_accepted_len:]
    del self.output_ids[-new_accepted_len:]
    num_searched = 0
    try:
        for token in new_ids:
            self.output_ids.append(token)
            num_searched += 1
            # Its matcher has accepted all of them.
            self.grammar = grammar if num_searched == new_accepted_len else None
            original(self, 1)
            if self.finished():
                self.finished_len = self.finished_len or len(self.output_ids)
                break
    finally:
        self.grammar = grammar
        self.output_ids.extend(new_ids[num_searched:])


def _next_turn(
    original: Callable, last_req: Any, req: Any, session_params: Any
) -> tuple[array, array]:
    """The prompt of a session's next turn, from what the last turn output."""
    last_turn = copy.copy(last_req)
    last_turn.output_ids = last_req.output_ids_through_stop
    return original(last_turn, req, session_params)


PATCH = Patch(
    "stops",
    {
        "sglang.srt.managers.schedule_batch.Req.update_finish_state": around(_finish_at_first_stop),
        "sglang.srt.session.session_controller.Session._concat_token_arrays": around(_next_turn),
    },
    why="when several tokens are accepted at once, SGLang searches all of them for each stop "
    "string in the order of the request; a stop that is later in the text but listed first wins, "
    "and the text then contains the earlier stop. PARSE accepts up to a hundred tokens at once, so "
    "this happens (found by the soak test). Tokens behind the stop are not sent, but count as "
    "`reasoning_tokens`, and a session's next prompt has them. In an iteration that brings no "
    "token, SGLang searches the whole output.",
    how="for requests with stop strings or patterns, checks the accepted tokens one by one, as "
    "plain decoding would; `reasoning_tokens` and sessions end at the stop; without new tokens "
    "nothing is searched.",
    upstream="docs/upstream.md",
    removed_when="SGLang ends a request, its counts and its session at the first stop in the text.",
)
