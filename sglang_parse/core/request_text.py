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
        saved: time for look-ups that is left, in the units of ``cost``; of a prompt's.
        match_len: ``TextMatch.match_len`` where the last draft of it begins.
        is_verified: the newest tokens are those of a draft of it.
        waited_ms: how long its request has waited for the next one.
        is_complete: nothing is added to it any more.
        ends_answer: the answer ends where it does.
        num_unused: characters of it that were left out, because no answer can be as long.
    """

    match: TextMatch
    length: TextLength
    cost: float = 0.0
    saved: float = 0.0
    match_len: int = 0
    is_verified: bool = False
    waited_ms: float = 0.0
    is_complete: bool = True
    ends_answer: bool = False
    num_unused: int = 0

    @property
    def is_at_end(self) -> bool:
        """Whether the answer has just come to the text's end, where it is to end, too."""
        return self.ends_answer and self.match.is_at_end

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

    def follow(self, output_ids: Sequence[int]) -> None:
        """The answer goes on; ``output_ids``: all of it."""
        match, new_ids = self.match, output_ids[self.match.num_seen :]
        is_decoded = new_ids and match.num_seen and not self.is_verified
        if is_decoded and match.follows and (rest := match.rest(1)):
            fits = rest[0] == new_ids[0]
            self.length.watch(match.match_len, fits=fits)
            if fits:
                self.length.refund(match.match_len)
        match.follow(new_ids)
        self.is_verified = False

    def count_covered(self, output_ids: Sequence[int]) -> tuple[int, int]:
        """(tokens of the text that are in the answer, tokens that are not); ``output_ids``: all of
        a finished answer."""
        self.match.follow(output_ids[self.match.num_seen :])
        covered = min(self.match.num_covered, len(output_ids), len(self.match))
        return covered, len(self.match) - covered
