"""A text that drafts for one request: a prediction, an earlier answer, another server's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_parse.core.policy.texts import TextLength
from sglang_parse.core.text_match import TextMatch


@dataclass(slots=True)
class RequestText:
    """A text that drafts for one request.

    Attributes:
        match: where the answer is in it.
        length: chooses its drafts' lengths; ``cost``: the last draft's, beyond a decode step.
        waited_ms: how long its request has waited for the next one.
        is_complete: nothing is added to it any more.
        ends_answer: the answer ends where it does.
        num_unused: characters of it that were left out, because no answer can be as long.
    """

    match: TextMatch
    length: TextLength
    cost: float = 0.0
    waited_ms: float = 0.0
    is_complete: bool = True
    ends_answer: bool = False
    num_unused: int = 0

    def replace(self, match: TextMatch, *, is_complete: bool = True) -> None:
        """Another text of the same source drafts."""
        self.match, self.is_complete, self.ends_answer = match, is_complete, False

    def extend(
        self,
        token_ids: Sequence[int],
        *,
        is_complete: bool = True,
        ends_answer: bool = True,
        num_unused: int = 0,
    ) -> None:
        """Adds tokens, maybe its last ones."""
        self.match.extend(token_ids, grows=not is_complete)
        self.is_complete, self.num_unused = is_complete, num_unused
        self.ends_answer = is_complete and ends_answer

    def count_covered(self, output_ids: Sequence[int]) -> tuple[int, int]:
        """(tokens of the text that are in the answer, tokens that are not).

        Args:
            output_ids: all of a finished answer.
        """
        self.match.follow(output_ids[self.match.num_seen :])
        covered = min(self.match.num_covered, len(output_ids), len(self.match))
        return covered, len(self.match) - covered
