"""What each rule keeps of a first draft at a threshold, and whether an error is in it. Pure.

The unit is a request's first draft: not its prefixes, which lie in one another, and not its later
rounds, which begin where the threshold put them. Which error counts is one of two losses:

    token    the first wrong token is kept, in a draft that is kept whole or cut
    answer   a finished draft is kept whole and its answer is wrong; for graders that only know that

Either is one score's comparison with the threshold t, so it can only fall as t rises:

    loss(t) = 1  <=>  score >= t
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sglang_parse.core.selection import select

Loss = Literal["token", "answer"]
TOKEN: Loss = "token"
ANSWER: Loss = "answer"
LOSSES = get_args(Loss)


@dataclass(frozen=True, slots=True)
class FirstDraft:
    """One request's first draft and the target's verdicts on it, which depend on no threshold.

    Attributes:
        problem: index into the list of items.
        verdicts: one per prefix.
        prefix_ends: prefix k is the draft's first ``prefix_ends[k]`` tokens.
        num_drafted: tokens of the draft.
        finished: the draft model ended its answer.
        first_wrong: the first prefix with an error in it; None where none has one, or the grader
            cannot say.
        is_answer_right: of a finished draft; else None.
        mass: the smallest probability that the two verdict tokens got together.
        draft_ms, verify_ms: the request's share of these stages.
    """

    problem: int
    verdicts: tuple[float, ...]
    prefix_ends: tuple[int, ...]
    num_drafted: int
    finished: bool
    first_wrong: int | None
    is_answer_right: bool | None
    mass: float
    draft_ms: float
    verify_ms: float

    def is_wrong(self, loss: Loss) -> bool:
        """Whether there is an error to keep."""
        if loss == TOKEN:
            return self.first_wrong is not None
        return self.is_answer_right is False

    def score(self, rule: str, loss: Loss) -> float:
        """The largest threshold at which the error is kept; -1 where there is none."""
        if not self.is_wrong(loss):
            return -1.0
        if loss == ANSWER:
            return self._whole(rule)
        wrong = self.first_wrong
        assert wrong is not None
        if rule == "longest":
            return max(self.verdicts[wrong:])
        up_to_error = min(self.verdicts[: wrong + 1])
        if rule == "answer-first" and self.finished:
            return max(self.verdicts[-1], up_to_error)
        return up_to_error

    def _whole(self, rule: str) -> float:
        """The largest threshold at which all of the draft is kept."""
        if rule == "longest" or (rule == "answer-first" and self.finished):
            return self.verdicts[-1]
        return min(self.verdicts)

    def kept(self, rule: str, threshold: float) -> int:
        """Draft tokens kept."""
        selected = select(
            *(self.verdicts, self.prefix_ends, threshold, rule), is_finished=self.finished
        )
        return selected.accepted_len

    def is_kept_whole(self, rule: str, threshold: float) -> bool:
        return self.kept(rule, threshold) == self.prefix_ends[-1]
