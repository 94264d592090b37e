"""The draft model as a source of drafts."""

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
        self._controller = controller

    def start(self, req: Req) -> str:
        state, controller = req.parse_state, self._controller
        always = state.policy.always_drafts
        plan = controller.plan(state.draft_key, state.num_failed, always=always)
        if plan is None:
            return controller.no_draft_reason
        state.start_draft(plan)
        return ""

    def observe(self, req: Req, one: Round) -> None:
        state = req.parse_state
        self._controller.observe_round(state.draft_key, one, state.num_failed)
