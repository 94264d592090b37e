"""Drafts that copy from the prompt, and from the output so far.

Code edits, tool calls, extraction and summaries copy from their prompt, and no client has to send
anything. The drafts are exact under every judge: the prompt has the text before the edit, or a
passage that somebody else wrote, and a lenient verdict at the place of a change would undo it.
"""

from __future__ import annotations

from sglang_parse.core.copies import BESIDE_PREDICTION, CopyLength, CopyStats
from sglang_parse.core.options import RequestOptions
from sglang_parse.core.phases import PREDICTION, PROMPT
from sglang_parse.core.prompt_match import PromptMatch
from sglang_parse.core.request_text import RequestText
from sglang_parse.core.round import Round
from sglang_parse.engine.sglang_types import Req
from sglang_parse.engine.sources.source import Source
from sglang_parse.engine.sources.text import SEARCH_MS_PER_TOKEN, TextParts, TextSource

SEARCH_SHARE = 0.02
"""Of a request's part of a decode step: what look-ups may take of each forward, at most, and of
each token that they brought."""
FRUITLESS = 1 / 8
"""Part of that, while the server's look-ups bring less than they take."""
KEPT = 0.99
"""What is kept of their balance with each look-up: about the last hundred count."""
MAX_SAVED = 0.25
"""Tokens' time that a request's look-ups leave unused for later ones, at most."""
LOOK_UP_MS = 0.1
"""Of a look-up, beside ``search_ms``, between forwards, whose weights leave no cache warm: a
constant, because the ranks' clocks differ."""


class PromptSource(TextSource):
    """Drafts what follows the newest tokens in prompt and output so far. Look-ups have a budget of
    their own: on a busy server, and where they brought nothing, there is one now and then."""

    explains = False  # others that do not draft say more
    is_exact, search_ms = True, SEARCH_MS_PER_TOKEN / 4
    rank = Source.rank  # behind texts that somebody gave and that fit

    def __init__(self, parts: TextParts) -> None:
        super().__init__(PROMPT, parts)
        self._copies, self._beside_prediction = CopyStats(), CopyStats(BESIDE_PREDICTION)
        self._balance = 20.0  # tokens that drafts brought, without those that look-ups took

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
            stats = self._beside_prediction if PREDICTION in texts else self._copies
            length = CopyLength(stats, self._budget_of(req), probe_tokens)
            texts[self.name] = RequestText(match, length, saved=MAX_SAVED)
        self._save(texts[self.name], 1)
        if any(text.is_at_end for text in texts.values()):
            return self.follow(req) or "the answer may end here"  # as the text that it followed
        return super().start(req)

    def _is_spent(self, req: Req, text: RequestText) -> bool:
        is_free = req.parse_state.policy.always_drafts
        return (text.saved <= 0 and not is_free) or super()._is_spent(req, text)

    def _pay(self, text: RequestText, search_ms: float) -> None:
        cost = self._controller.tokens_in(LOOK_UP_MS + search_ms)
        text.saved -= cost
        self._balance = KEPT * self._balance - cost

    def _save(self, text: RequestText, count: int) -> None:
        share = SEARCH_SHARE * (1 if self._balance >= 0 else FRUITLESS)
        text.saved = min(MAX_SAVED, text.saved + share * count)

    def observe(self, req: Req, one: Round) -> None:
        super().observe(req, one)
        text = req.parse_state.notes.texts[self.name]
        self._balance += one.num_output - text.cost
        self._save(text, one.num_output)

    def retract(self, req: Req) -> None:
        req.parse_state.notes.texts.pop(self.name, None)
