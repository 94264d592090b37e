"""The target's EAGLE-3 head as a source of drafts.

It proposes right before the pass that verifies (``engine.eagle``), so nothing is drafted here. To
the policy its drafts are decode steps that output several tokens: what another source's drafts have
to beat. It is asked last, because it always has a draft.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.phases import EAGLE3, VerifyOutcome
from sglang_parse.core.policy.controller import DRAFTING_OFF, Controller
from sglang_parse.core.policy.drafting import Acceptance
from sglang_parse.engine.sglang_types import Req

BYPASSED = f"{EAGLE3}: the head does not run for this request"


class EagleSource:
    """Drafts that the EAGLE-3 head proposes.

    Args:
        config: the server's settings.
        controller: chooses their length.
        longest: tokens that the head can propose.
    """

    name = EAGLE3

    def __init__(self, config: ParseConfig, controller: Controller, longest: int) -> None:
        self._config, self._controller, self._longest = config, controller, longest
        self._acceptance = Acceptance(controller.config.error_rate)

    def start(self, req: Req, new_ids: Sequence[int]) -> str:  # noqa: ARG002
        state = req.parse_state
        if state.policy.decode_accelerator != EAGLE3:
            return BYPASSED
        if self._config.drafting == "never" and not state.policy.always_drafts:
            return DRAFTING_OFF
        state.wait_for_chain(self._controller.chain_len(self._longest, self._acceptance))
        return ""

    def observe(self, req: Req, outcome: VerifyOutcome) -> None:
        del req
        memory = self._controller.config.memory * self._controller.num_running
        self._acceptance.observe(outcome, memory)
