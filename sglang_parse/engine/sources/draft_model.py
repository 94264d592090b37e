"""The draft model as a source of drafts.

Where its draft ends, the last block has proposed what may follow (``core.block``). The draft model
has not confirmed these candidates, so no verdict is about them: the draft's pass compares them with
the target's choices, which is exact under every judge.
"""

from __future__ import annotations

from itertools import takewhile

from sglang_parse.core.phases import MODEL
from sglang_parse.core.policy.controller import Controller
from sglang_parse.core.round import Round
from sglang_parse.engine.logits.grammar import num_allowed
from sglang_parse.engine.requests import tokens_left
from sglang_parse.engine.sglang_types import Req
from sglang_parse.engine.sources.source import Source
from sglang_parse.engine.sources.text import tail_cost


class DraftModelSource(Source):
    """Drafts that the draft model writes over the next iterations, planned by the controller."""

    name = MODEL
    takes_tails = True

    def __init__(self, controller: Controller) -> None:
        self._controller, self._num_rounds = controller, 0
        self._gain: float | None = None  # mean output candidates of a draft that has some

    def start(self, req: Req) -> str:
        state, controller = req.parse_state, self._controller
        always = state.policy.always_drafts
        plan = controller.plan(state.draft_key, state.num_failed, always=always)
        if plan is None:
            return controller.no_draft_reason
        state.start_draft(plan)
        return ""

    def num_candidates(self, req: Req) -> int:
        """None where KV is short, or where the draft's unverified end begins the next draft. The
        answer's end is left to the target, as in texts' tails."""
        state, draft = req.parse_state, req.parse_state.draft
        if draft.is_truncated or draft.num_verified < state.num_drafted:
            return 0
        limit = max(0, tokens_left(req) - 1 - state.num_drafted)
        stop_ids = state.policy.stop_ids
        more = takewhile(lambda token: token not in stop_ids, draft.candidates[:limit])
        count = max(0, num_allowed(req, [*draft.token_ids, *more]) - state.num_drafted)
        return count if self._pays(tail_cost(self._controller, state, count)) else 0

    def observe(self, req: Req, one: Round) -> None:
        state, config = req.parse_state, self._controller.config
        self._controller.observe_round(state.draft_key, one, state.num_failed)
        self._num_rounds += 1
        if one.draft.candidates:
            num = one.num_candidates_output
            before = num if self._gain is None else self._gain
            self._gain = before + config.mean_weight * (num - before)

    def _pays(self, cost: float) -> bool:
        """Whether candidates bring what their rows cost, as far as known; now and then they are
        tried again."""
        is_tried = self._num_rounds % self._controller.config.retry_every == 0
        return is_tried or self._gain is None or self._gain >= cost
