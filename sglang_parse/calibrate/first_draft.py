"""A request's first draft, and the loss of accepting it at a threshold. Pure.

A request counts once, by its first draft: the prefixes of a draft are nested, and later rounds
depend on the threshold. There are two losses:

    token    the first wrong token of the draft is accepted
    answer   a finished draft is accepted whole and its answer is wrong (for graders that cannot
             locate an error)

Each is ``score >= threshold`` for one score per draft, so it can only fall as the threshold rises.
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
    """A first draft with its verdicts, which depend on no threshold.

    Attributes:
        problem: index into the list of items.
        verdicts: one per prefix.
        prefix_ends: prefix k is the draft's first ``prefix_ends[k]`` tokens.
        num_drafted: tokens of the draft.
        finished: the draft model ended its answer.
        first_wrong: index of the first prefix with an error; None without an error, or where the
            grader cannot locate one.
        is_answer_right: of a finished draft; else None.
        draft_ms, verify_ms: the request's fraction of these stages.
    """

    problem: int
    verdicts: tuple[float, ...]
    prefix_ends: tuple[int, ...]
    num_drafted: int
    finished: bool
    first_wrong: int | None
    is_answer_right: bool | None
    draft_ms: float
    verify_ms: float

    def is_wrong(self, loss: Loss) -> bool:
        """Whether the draft has an error that this loss counts."""
        return self.first_wrong is not None if loss == TOKEN else self.is_answer_right is False

    def score(self, selection: str, loss: Loss) -> float:
        """Returns the largest threshold at which the error is accepted; -1 without an error."""
        if not self.is_wrong(loss):
            return -1.0
        answer_decides = selection == "answer-first" and self.finished
        if loss == ANSWER:
            is_last = selection == "longest" or answer_decides
            return self.verdicts[-1] if is_last else min(self.verdicts)
        wrong = self.first_wrong
        assert wrong is not None
        if selection == "longest":
            return max(self.verdicts[wrong:])
        up_to_error = min(self.verdicts[: wrong + 1])
        return max(self.verdicts[-1], up_to_error) if answer_decides else up_to_error

    def accepted_len(self, selection: str, threshold: float) -> int:
        """Returns the number of accepted draft tokens."""
        selected = select(
            *(self.verdicts, self.prefix_ends, threshold, selection), is_finished=self.finished
        )
        return selected.accepted_len
