"""Drafts that copy from the prompt, and from the output so far.

Code edits, tool calls, extraction and summaries copy from their prompt, and no client has to send
anything. The drafts are exact under every judge: the prompt has the text before the edit, or a
passage that somebody else wrote, and a lenient verdict at the place of a change would undo it.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_parse.core.copies import CopyLength, CopyStats
from sglang_parse.core.options import RequestOptions
from sglang_parse.core.phases import PROMPT
from sglang_parse.core.prompt_match import PromptMatch
from sglang_parse.core.request_text import RequestText
from sglang_parse.core.text_match import TextMatch
from sglang_parse.engine.sglang_types import Req
from sglang_parse.engine.sources.source import Source
from sglang_parse.engine.sources.text import SEARCH_MS_PER_TOKEN, TextParts, TextSource

SEARCH_SHARE = 0.02
"""Of the time in which decode steps output what was output: what look-ups may take, at most."""
MAX_SAVED = 1.0
"""Tokens' time that look-ups leave unused for later ones, at most."""


class PromptSource(TextSource):
    """Drafts what follows the newest tokens in prompt and output so far. Look-ups have a budget of
    their own, one for all requests: long prompts on a busy server are looked up now and then."""

    explains = False  # others that do not draft say more
    is_exact, search_ms = True, SEARCH_MS_PER_TOKEN / 4
    rank = Source.rank  # behind texts that somebody gave and that fit

    def __init__(self, parts: TextParts) -> None:
        super().__init__(PROMPT, parts)
        self._copies, self._saved = CopyStats(), MAX_SAVED

    def receive(self, req: Req, options: RequestOptions) -> None:
        is_on = self._config.prompt_drafts == options.prompt_drafts == "on"
        if is_on and not req.parse_policy.is_plain:
            req.parse_incoming[self.name] = True

    def serves(self, req: Req) -> bool:
        return self.name in req.parse_incoming

    def start(self, req: Req) -> str:
        texts = req.parse_state.notes.texts
        if self.name not in texts:  # here, not for requests that never draft
            match = PromptMatch(req.origin_input_ids, req.vocab_size)
            adapts = self._controller.is_adaptive and not req.parse_state.policy.always_drafts
            probe_tokens = 0 if adapts else self._controller.config.probe_tokens
            length = CopyLength(self._copies, self._budget_of(req), probe_tokens)
            texts[self.name] = RequestText(match, length)
        num_new = len(req.parse_state.output_ids) - texts[self.name].match.num_seen
        self._saved = min(MAX_SAVED, self._saved + SEARCH_SHARE * num_new)
        return super().start(req)

    def _rest(self, text: RequestText, match: TextMatch, limit: int) -> Sequence[int]:
        is_known = match.follows or self._saved > 0
        return super()._rest(text, match, limit) if is_known else ()

    def _pay(self, text: RequestText, cost: float) -> None:
        del text
        self._saved -= cost

    def retract(self, req: Req) -> None:
        req.parse_state.notes.texts.pop(self.name, None)
