"""Drafts of the text that a request's grammar forces: jump-forward.

No model writes them. The source is asked behind the draft model, whose tokens the grammar masks,
drafts forced text, too, and what comes after it.
"""

from __future__ import annotations

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.phases import GRAMMAR
from sglang_parse.core.policy.controller import DRAFTING_OFF, Controller
from sglang_parse.core.policy.texts import TextSourceStats
from sglang_parse.core.round import Round
from sglang_parse.engine.logits.grammar import forced_after
from sglang_parse.engine.requests import tokens_left
from sglang_parse.engine.sglang_types import Req
from sglang_parse.engine.sources.source import Source

MIN_TOKENS = 4
"""Shortest draft: the target may spell the same text in other tokens."""
NOTHING_FORCED = f"{GRAMMAR}: it forces too few tokens"


class ForcedSource(Source):
    """Drafts of forced text."""

    name = GRAMMAR
    explains = False  # most grammars force little

    def __init__(self, config: ParseConfig, controller: Controller) -> None:
        self._config, self._controller = config, controller
        self._stats, self._num_refused = TextSourceStats(controller.config), 0

    def serves(self, req: Req) -> bool:
        return req.parse_state.notes.grammar is not None

    def start(self, req: Req) -> str:
        state = req.parse_state
        if self._config.drafting == "never" and not state.policy.always_drafts:
            return DRAFTING_OFF
        limit = min(self._config.draft_tokens, tokens_left(req))
        token_ids = forced_after(state, limit)
        if not self._pays(len(token_ids), always=state.policy.always_drafts):
            return NOTHING_FORCED
        state.give_draft(token_ids, 1, self.name)
        return ""

    def observe(self, req: Req, one: Round) -> None:
        del req
        self._stats.watch(0, fits=one.num_output > 0)
        self._stats.observe(one)

    def _pays(self, num_tokens: int, *, always: bool) -> bool:
        if num_tokens < MIN_TOKENS:
            return False
        cost = self._controller.extra_cost(1 + num_tokens, always=always)
        gain = self._stats.expect(0, num_tokens) - cost
        if gain >= self._controller.config.text_min_gain:
            return True
        self._num_refused += 1  # another grammar's text may be spelled as it is
        return self._num_refused % self._controller.config.retry_every == 0
