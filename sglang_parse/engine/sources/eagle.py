"""The target's EAGLE-3 head or MTP layer as a source of drafts.

It proposes right before the pass that verifies (``engine.eagle``), so nothing is drafted here. To
the policy its drafts are decode steps that output several tokens: what another source's drafts have
to beat. It is asked last, because it always has a draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.policy.controller import DRAFTING_OFF, Controller
from sglang_parse.core.proposals import ProposalAcceptance
from sglang_parse.core.round import Round
from sglang_parse.core.stage import Stage
from sglang_parse.engine.eagle_head import EagleHead
from sglang_parse.engine.logits.grammar import num_allowed
from sglang_parse.engine.sglang_types import Req
from sglang_parse.engine.sources.source import Source

BYPASSED = "the head does not run for this request"


class EagleSource(Source):
    """Drafts that the head proposes.

    Args:
        controller: knows what passes and the head cost.
        head: proposes them; it runs as many steps as its longest proposal has tokens, or all.
    """

    takes_tails = yields_to_copies = True  # a few tokens: a judge accepts little more of them

    def __init__(self, config: ParseConfig, controller: Controller, head: EagleHead) -> None:
        self._config, self._controller, self._head = config, controller, head
        self.name = config.proposer
        self._step_ms, self._length = 0.0, 0  # 0: not known yet
        self._acceptance = ProposalAcceptance(head.num_steps, controller.config.error_rate)

    def start(self, req: Req) -> str:
        state = req.parse_state
        if state.policy.proposer != self.name:
            return f"{self.name}: {BYPASSED}"
        if self._config.drafting == "never" and not state.policy.always_drafts:
            return DRAFTING_OFF
        # A question cannot judge a few tokens.
        exact = self._config.is_semantic and not self._config.scores_tokens
        state.wait_for_proposal(self.length(), self.name, is_exact=exact)
        return ""

    def length(self) -> int:
        """Tokens to propose: those with the most output per ms, if all running requests decode
        so. Chosen once for all of them, until proposals are verified."""
        longest = self._head.num_steps
        if not (self._controller.is_adaptive and self._step_ms):
            return longest
        self._length = self._length or max(range(longest, 0, -1), key=self._rate)
        return self._length

    def _rate(self, length: int) -> float:
        pass_ms = self._controller.ms(Stage.VERIFY, self._controller.num_running * (1 + length))
        head_ms = self._step_ms * self._head.steps_for(length)
        return self._acceptance.expect(length) / (pass_ms + head_ms)

    def observe(self, req: Req, one: Round) -> None:
        del req
        costs, config = self._controller, self._controller.config
        self._acceptance.observe(one, 4 * config.memory * costs.num_running)  # lengths share it
        self._length = 0
        if costs.head_steps:
            latest_ms = costs.head_ms / costs.head_steps  # the extend is the first step's forward
            known_ms = self._step_ms or latest_ms
            weight = config.mean_weight / costs.num_running
            self._step_ms = known_ms + weight * (latest_ms - known_ms)


def take_chain(req: Req, proposed: Sequence[int]) -> None:
    """What the head proposed is the request's draft; compared token by token where no draft was
    due: in plain requests, and at a rejected segment's end. The target chooses the answer's end
    itself, in the row before it, so nothing is asked about a complete answer."""
    state = req.parse_state
    token_ids = [*takewhile(lambda token: token not in state.policy.stop_ids, proposed)]
    is_exact, name = state.draft.judge is None, state.policy.proposer
    state.give_draft(token_ids[: num_allowed(req, token_ids)], 1, name, is_exact=is_exact)
