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
from sglang_parse.engine.grammar import forced_after
from sglang_parse.engine.requests import tokens_left
from sglang_parse.engine.sglang_types import Req

PRIOR_HIT = 0.9
"""Prior probability that the target chooses the first of the tokens that the text was split into;
it may spell the same text in others."""
NO_GRAMMAR = f"{GRAMMAR}: the request has none"
NOTHING_FORCED = f"{GRAMMAR}: it forces too few tokens"


class ForcedSource:
    """Drafts of forced text.

    Args:
        config: the server's settings.
        controller: knows the costs of verify passes.
    """

    name = GRAMMAR

    def __init__(self, config: ParseConfig, controller: Controller) -> None:
        self._config, self._controller = config, controller
        self._agreement = Agreement(PRIOR_HIT)

    def start(self, req: Req, new_ids: Sequence[int]) -> str:
        state = req.parse_state
        if state.grammar is None:
            return NO_GRAMMAR
        if self._config.drafting == "never" and not state.policy.always_drafts:
            return DRAFTING_OFF
        limit = min(self._config.draft_tokens, tokens_left(req) - len(new_ids))
        token_ids = forced_after(state, new_ids, limit)
        if not self._pays(len(token_ids)):
            return NOTHING_FORCED
        state.give_draft(token_ids, 1, self.name)
        return ""

    def observe(self, req: Req, outcome: VerifyOutcome) -> None:
        del req
        num_output = min(outcome.accepted_len + outcome.num_matched, outcome.num_drafted)
        self._agreement.observe(outcome.num_drafted, num_output, DECAY)

    def _pays(self, num_tokens: int) -> bool:
        if num_tokens < MIN_TOKENS:
            return False
        gain = self._agreement.expect(num_tokens) - self._controller.extra_cost(1 + num_tokens)
        return gain >= MIN_GAIN
