"""Finds where an answer is in a text that may draft it: a prediction, or an earlier answer.

While the answer follows the text, what comes next is the text's rest. After a divergence the
answer's newest tokens are looked up in the text; the rest from there is the next draft. All of it
are the target's tokens: a text is tokenized once, and what the target writes after a divergence
decides where it is entered again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

MAX_MATCH = 8
"""Newest tokens that are looked up; a longer match says no more."""
NEAR = 16
"""Tokens beyond the place of an equally long change within which one newest token is looked up."""
MIN_FAR = 2
"""Newest tokens that are looked up in the rest of the text."""
MAX_MISALIGNED = 64
"""Hits across the boundaries of tokens after which a look-up gives up."""
_WIDTH = array("I").itemsize


class TextMatch:
    """One text, followed by one answer.

    Args:
        token_ids: the target's tokens of the text, or of its beginning: ``extend`` adds more.

    Attributes:
        num_seen: tokens of the answer so far.
        num_covered: how many of them were the text's next ones, or where the text was entered
            again.
        match_len: newest tokens that were looked up to enter the text; 0 while the answer has
            followed it from its beginning, or for a whole draft since.
    """

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self._tokens = array("I", token_ids)
        self._bytes = bytearray(self._tokens.tobytes())
        self._grows = False
        self.reset()

    def reset(self) -> None:
        """Starts over with an empty answer."""
        self.num_seen = self.num_covered = self.match_len = 0
        self._place: int | None = 0
        self._behind = 0
        self._newest: list[int] = []
        self._ahead: list[int] = []
        self._num_off = 0

    @classmethod
    def entered(
        cls, token_ids: Sequence[int], place: int, num_seen: int, *, grows: bool = False
    ) -> TextMatch:
        """A text that an answer of ``num_seen`` tokens enters at ``place``.

        Args:
            grows: it is on its way: the answer may get ahead of what has arrived.
        """
        match = cls(token_ids)
        match._grows = grows
        match._place = match._behind = place
        match.num_seen, match.match_len = num_seen, MAX_MATCH
        return match

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def follows(self) -> bool:
        """Whether the answer is at a known place of the text."""
        return self._place is not None

    def extend(self, token_ids: Sequence[int], *, grows: bool = False) -> None:
        """Adds tokens to the text's end, its last ones unless it ``grows``."""
        added = array("I", token_ids)
        self._tokens.extend(added)
        self._bytes += added.tobytes()
        self._grows, ahead, self._ahead = grows, self._ahead, []
        self._advance(ahead)

    def follow(self, token_ids: Sequence[int]) -> None:
        """The answer goes on with ``token_ids``."""
        self._advance(token_ids)
        self.num_seen += len(token_ids)
        self._newest = [*self._newest, *token_ids][-MAX_MATCH:]

    def _advance(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            place = self._place
            if self._grows and place == len(self._tokens):
                self._ahead.append(token)  # compared with what will arrive
            elif place is not None and place < len(self._tokens) and self._tokens[place] == token:
                self._place = self._behind = place + 1
                self.num_covered += 1
            else:
                self._num_off = 0 if place is not None else self._num_off
                self._place = None
            if self._place is None:
                self._num_off += 1

    def rest(self, limit: int) -> Sequence[int]:
        """The text's next tokens, at most ``limit``; looks for the answer's place first."""
        if self._place is None:
            self._enter()
        if self._place is None:
            return ()
        return self._tokens[self._place : self._place + limit].tolist()

    def follow_draft(self) -> None:
        """A whole draft of the text was accepted: where it was entered no longer matters."""
        self.match_len = 0

    def _enter(self) -> None:
        """Enters the text where the newest tokens are, the nearest place after the last one first;
        a place far off only for a longer match."""
        behind, num_tokens = self._behind, len(self._tokens)
        near, near_len = self._find(1, behind, min(num_tokens, behind + self._num_off + NEAR))
        far, far_len = self._find(MIN_FAR, behind, num_tokens)
        before, before_len = self._find(MIN_FAR, 0, behind)
        if before_len > far_len:
            far, far_len = before, before_len
        place, length = (near, near_len) if near_len + 1 >= far_len else (far, far_len)
        if length:
            self.num_covered += min(length, self._num_off)
            self._place = self._behind = place
            self.match_len, self._num_off = length, 0

    def _find(self, shortest: int, start: int, end: int) -> tuple[int, int]:
        """Looks up the newest tokens, at least ``shortest``, more if there are.

        Returns:
            The first place in (start, end] that the longest match ends at, and its length; (0, 0)
            for none.
        """
        found = 0, 0
        for length in range(shortest, min(MAX_MATCH, len(self._newest)) + 1):
            place = self._find_tokens(self._newest[-length:], max(0, start + 1 - length), end)
            if place is None:
                break
            found = place + length, length
        return found

    def _find_tokens(self, token_ids: Sequence[int], start: int, end: int) -> int | None:
        wanted, at = array("I", token_ids).tobytes(), start * _WIDTH
        for _ in range(MAX_MISALIGNED):
            at = self._bytes.find(wanted, at, end * _WIDTH)
            if at < 0:
                return None
            if at % _WIDTH == 0:
                return at // _WIDTH
            at += 1
        return None
