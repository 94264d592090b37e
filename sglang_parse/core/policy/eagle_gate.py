"""Decides per request whether the EAGLE-3 head runs for it.

A head needs the hidden states of every token of a request: prompt, draft and answer. That costs
one layer per token, whether or not the target has decode steps to accelerate. If verify passes
emit nearly the whole answer, the head costs more than it saves. So the gate weighs, before a
request starts, recent answers of its threshold against the cost of the head and of a decode step.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from sglang_parse.core.policy.lru import lru_get
from sglang_parse.core.policy.stage_cost import StageCost

MIN_ANSWERS = 8
"""Answers of a threshold before the gate may bypass the head."""
SAVED_FRACTION = 0.5
"""Fraction of decode time that a head saves: on the demo pair stock EAGLE3 is 1.9 to 2 times as
fast as plain decoding, at 1 request and at 16."""
RESUME_RATIO = 1.5
"""Ratio of saved time to cost at which the head is used again. The KV of answers without it is
cached separately, so switching is not free."""
PROBE_EVERY = 64
"""One of this many bypassed requests uses the head all the same, because costs change."""
MIN_WEIGHT = 1 / 32
"""Minimum weight of an answer in the means: most have no decode step, some have many."""
MAX_THRESHOLDS = 128


@dataclass(slots=True)
class _Answers:
    """Recency-weighted statistics of one threshold's answers.

    Attributes:
        count: answers so far.
        num_tokens: mean tokens a head has to process per answer, its prompt included.
        num_decoded: mean tokens of decode steps per answer.
        uses_eagle: the last decision.
        num_bypassed: requests since the head was last used.
    """

    count: int = 0
    num_tokens: float = 0.0
    num_decoded: float = 0.0
    uses_eagle: bool = True
    num_bypassed: int = 0

    def add(self, num_tokens: int, num_decoded: int) -> None:
        self.count += 1
        weight = max(MIN_WEIGHT, 1 / self.count)
        self.num_tokens += weight * (num_tokens - self.num_tokens)
        self.num_decoded += weight * (num_decoded - self.num_decoded)


@dataclass(slots=True)
class EagleGate:
    """The gate of one server."""

    _cost: StageCost = field(default_factory=StageCost)
    _answers: OrderedDict[float, _Answers] = field(default_factory=OrderedDict)

    def observe_cost(self, num_tokens: int, ms: float) -> None:
        """Records the head's time for this many prompt tokens."""
        self._cost.add(num_tokens, ms)

    def observe_answer(self, threshold: float, num_tokens: int, num_decoded: int) -> None:
        """Records a finished answer.

        Args:
            num_tokens: uncached prompt tokens and output tokens.
            num_decoded: output tokens of decode steps.
        """
        self._of(threshold).add(num_tokens, num_decoded)

    def pays(self, threshold: float, ms_per_token: float) -> bool:
        """Decides for one request of this threshold; call it once per request.

        Args:
            ms_per_token: time of a decoded token at the current load.
        """
        answers = self._of(threshold)
        cost = self._cost.at(answers.num_tokens)
        if answers.count < MIN_ANSWERS or cost is None:
            return True
        saved = SAVED_FRACTION * answers.num_decoded * ms_per_token
        answers.uses_eagle = saved >= cost * (1.0 if answers.uses_eagle else RESUME_RATIO)
        answers.num_bypassed = 0 if answers.uses_eagle else (answers.num_bypassed + 1) % PROBE_EVERY
        return not answers.num_bypassed

    def _of(self, threshold: float) -> _Answers:
        return lru_get(self._answers, threshold, _Answers, MAX_THRESHOLDS)
