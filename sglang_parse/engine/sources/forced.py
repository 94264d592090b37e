"""Drafts of the text that a request's grammar forces: jump-forward.

No model writes them. The source is asked last: the draft model, whose tokens the grammar masks,
drafts forced text, too, and what comes after it.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.phases import GRAMMAR
from sglang_parse.core.policy.acceptance import VerifyOutcome
from sglang_parse.core.policy.controller import DRAFTING_OFF, Controller
from sglang_parse.core.policy.text_length import DECAY, MIN_GAIN, MIN_TOKENS, Agreement
from sglang_parse.engine.grammar import forced_after, num_allowed
from sglang_parse.engine.requests import tokens_left
from sglang_parse.engine.sglang_types import Req
from sglang_parse.engine.sources.incoming import TextEncoder

PRIOR_HIT = 0.9
"""Prior probability that the target chooses the first of the tokens that the text was split into;
it may spell the same text in others."""
NUM_CONTEXT = 8
"""Tokens before the text that its first token may depend on."""
NO_GRAMMAR = f"{GRAMMAR}: the request has none"
NOTHING_FORCED = f"{GRAMMAR}: it forces too few tokens"


class ForcedSource:
    """Drafts of forced text.

    Args:
        config: the server's settings.
        controller: knows the costs of verify passes.
        encoder: tokenizes the text.
    """

    name = GRAMMAR

    def __init__(self, config: ParseConfig, controller: Controller, encoder: TextEncoder) -> None:
        self._config, self._controller, self._encoder = config, controller, encoder
        self._agreement = Agreement(PRIOR_HIT)

    def start(self, req: Req, new_ids: Sequence[int]) -> str:
        state = req.parse_state
        if state.grammar is None:
            return NO_GRAMMAR
        if self._config.drafting == "never" and not state.policy.always_drafts:
            return DRAFTING_OFF
        before = [*state.output_ids, *new_ids]
        limit = min(self._config.draft_tokens, tokens_left(req) - len(new_ids))
        token_ids = self._tokens(*forced_after(state, before), before)[: max(0, limit)]
        token_ids = token_ids[: num_allowed(req, token_ids, new_ids)]
        if not self._pays(len(token_ids)):
            return NOTHING_FORCED
        state.give_draft(token_ids, 1, self.name)
        return ""

    def observe(self, req: Req, outcome: VerifyOutcome) -> None:
        del req
        num_output = min(outcome.accepted_len + outcome.num_matched, outcome.num_drafted)
        self._agreement.observe(outcome.num_drafted, num_output, DECAY)

    def _tokens(self, token_ids: list[int], text: str, before: Sequence[int]) -> Sequence[int]:
        if not text:
            return token_ids
        return self._encoder.encode_after(self._encoder.decode(before[-NUM_CONTEXT:]), text)

    def _pays(self, num_tokens: int) -> bool:
        if num_tokens < MIN_TOKENS:
            return False
        gain = self._agreement.expect(num_tokens) - self._controller.extra_cost(1 + num_tokens)
        return gain >= MIN_GAIN
