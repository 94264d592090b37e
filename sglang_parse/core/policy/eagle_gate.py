"""Whether an EAGLE-3 head reads along with a request: only who is read can be accelerated.

A head proposes the target's next tokens, and for that it reads all that is before them: prompt,
draft and continuation. That costs a layer's time per token, whether or not the target has steps
left to take. Where passes bring nearly all of an answer, the head would read it for nothing.

So it is weighed before a request begins: what answers of its threshold were read and stepped
lately, what reading so much takes, and what a step's token takes at the load there is. Numbers
only, as ``controller``.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from sglang_parse.core.policy.lru import used
from sglang_parse.core.policy.stage_cost import StageCost

KNOWN = 8
"""Answers of a threshold from which something is known of it: all those before are read."""
SAVED = 0.5
"""Share of what the target's tokens take that a head ahead of it saves: on the demo pair stock
EAGLE3 is 1.9 to 2 times as fast as the plain target, at 1 request and at 16."""
SURER = 1.5
"""How many times its cost reading must save to be taken up again: an answer that is not read has
its KV cached apart from those that are."""
AGAIN = 64
"""Requests of a threshold of which one is read all the same: prices change."""
NEWEST = 1 / 32
"""Least weight of an answer in the means of its threshold: most have no step, some have many."""
MAX_THRESHOLDS = 128
"""Thresholds kept, the ones used last: a client may send any."""


@dataclass(slots=True)
class _Answers:
    """The answers of one threshold, the latest counting most.

    Attributes:
        count: how many there were.
        tokens, stepped: means of what a head had to read of one, and of what steps wrote of it.
        is_read: what was last decided; ``num_inflight``: requests since one was read.
    """

    count: int = 0
    tokens: float = 0.0
    stepped: float = 0.0
    is_read: bool = True
    num_inflight: int = 0

    def add(self, tokens: int, stepped: int) -> None:
        self.count += 1
        weight = max(NEWEST, 1 / self.count)
        self.tokens += weight * (tokens - self.tokens)
        self.stepped += weight * (stepped - self.stepped)


@dataclass(slots=True)
class EagleGate:
    """What one server knows of it."""

    _cost: StageCost = field(default_factory=StageCost)
    _answers: OrderedDict[float, _Answers] = field(default_factory=OrderedDict)

    def observe_cost(self, tokens: int, ms: float) -> None:
        """The head read so many tokens of prompts."""
        self._cost.add(tokens, ms)

    def observe_answer(self, threshold: float, tokens: int, stepped: int) -> None:
        """An answer is over.

        Args:
            tokens: of its prompt, as far as it was not cached, and of itself.
            stepped: those of them that steps of the target wrote.
        """
        self._of(threshold).add(tokens, stepped)

    def pays(self, threshold: float, ms_per_token: float) -> bool:
        """Whether the head reads along with a request of this threshold; ask once for each.

        Args:
            ms_per_token: what a token that the target steps takes, at the load there is.
        """
        answers = self._of(threshold)
        cost = self._cost.at(answers.tokens)
        if answers.count < KNOWN or cost is None:
            return True
        saved = SAVED * answers.stepped * ms_per_token
        answers.is_read = saved >= cost * (1.0 if answers.is_read else SURER)
        answers.num_inflight = 0 if answers.is_read else (answers.num_inflight + 1) % AGAIN
        return not answers.num_inflight

    def _of(self, threshold: float) -> _Answers:
        return used(self._answers, threshold, _Answers, MAX_THRESHOLDS)
