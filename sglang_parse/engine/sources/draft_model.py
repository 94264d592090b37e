"""The draft model as a source of drafts."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_parse.core.phases import MODEL
from sglang_parse.core.policy.acceptance import VerifyOutcome
from sglang_parse.core.policy.controller import Controller
from sglang_parse.engine.sglang_types import Req


class DraftModelSource:
    """Drafts that the draft model writes over the next iterations, planned by the controller."""

    name = MODEL

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def start(self, req: Req, new_ids: Sequence[int]) -> str:  # noqa: ARG002
        state = req.parse_state
        controller = self._controller
        plan = controller.plan(*state.stats_key, always=state.policy.always_drafts)
        if plan is None:
            return controller.no_draft_reason
        state.start_draft(plan)
        return ""

    def observe(self, req: Req, outcome: VerifyOutcome) -> None:
        threshold, num_failed, adapter = req.parse_state.stats_key
        self._controller.observe_round(threshold, outcome, num_failed, adapter)
