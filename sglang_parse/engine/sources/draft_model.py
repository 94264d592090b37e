"""The draft model as a source of drafts.

Where its draft ends, the last block has proposed what may follow (``core.block``). The draft model
has not confirmed these candidates, so no verdict is about them: the draft's pass compares them with
the target's choices, which is exact under every judge.
"""

from __future__ import annotations

from sglang_parse.core.phases import MODEL
from sglang_parse.core.policy.controller import Controller
from sglang_parse.core.round import Round
from sglang_parse.engine.sglang_types import Req
from sglang_parse.engine.sources.source import Source


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

    def candidates_pay(self, req: Req, count: int) -> bool:
        """As far as known; now and then they are tried again."""
        state, controller = req.parse_state, self._controller
        is_tried = self._num_rounds % controller.config.retry_every == 0
        always = state.policy.always_drafts
        cost = controller.tail_cost(state.num_drafted, count, always=always)
        return is_tried or self._gain is None or self._gain >= cost

    def observe(self, req: Req, one: Round) -> None:
        state, config = req.parse_state, self._controller.config
        self._controller.observe_round(state.draft_key, one, state.num_failed)
        self._num_rounds += 1
        if one.draft.candidates:
            num = one.num_candidates_output
            before = num if self._gain is None else self._gain
            self._gain = before + config.mean_weight * (num - before)
