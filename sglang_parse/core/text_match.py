"""Finds where an answer is in a text that may draft it: a prediction, or an earlier answer.

While the answer follows the text, what comes next is the text's rest. After a divergence the
answer's newest tokens are looked up in the text; the rest from there is the next draft. All of it
are the target's tokens: a text is tokenized once, and what the target writes after a divergence
decides where it is entered again.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Self

import numpy as np

MAX_MATCH = 8
"""Newest tokens that are looked up; a longer match says no more."""
NEAR = 16
"""Tokens beyond the place of an equally long change within which one newest token is looked up."""
MIN_FAR = 2
"""Newest tokens that are looked up in the rest of the text."""
MAX_PLACES = 4096
"""Places of the newest token before and after the last place that a look-up considers."""
PATIENCE = 8
"""While the answer is off the text by n tokens, a look-up that finds nothing is repeated after
1 + n // PATIENCE more."""
CLOSING = 4
"""Tokens behind a text's end that close what it is in: a code block, a quotation."""


class TextMatch:
    """One text, followed by one answer.

    >>> text = TextMatch([1, 2, 3, 4, 5, 6])
    >>> text.follow([1, 9, 3])  # 9 instead of 2
    >>> text.follows, text.rest(2)
    (False, [4, 5])

    Args:
        token_ids: the target's tokens of the text, or of its beginning: ``extend`` adds more.

    Attributes:
        num_seen: tokens of the answer so far.
        num_covered: how many of them were the text's next ones, or where the text was entered
            again.
        match_len: newest tokens that are the text's, MAX_MATCH at most; 0 while the answer has
            followed it from its beginning, or for a whole draft since.
        num_searched: tokens of the text that all look-ups so far went through.
    """

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self._tokens = np.array(token_ids, np.int32)
        self._grows = False
        self.num_searched = 0
        self.reset()

    def reset(self) -> None:
        self.num_seen = self.num_covered = self.match_len = 0
        self._place: int | None = 0
        self._behind = 0
        self._newest: list[int] = []
        self._ahead: list[int] = []
        self._num_off = self._next_search = 0

    @classmethod
    def entered(
        cls, token_ids: Sequence[int], place: int, num_seen: int, *, grows: bool = False
    ) -> TextMatch:
        """A text that an answer of ``num_seen`` tokens enters at ``place``; if it ``grows``, it is
        on its way: the answer may get ahead of what has arrived."""
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

    @property
    def is_at_end(self) -> bool:
        """Whether the answer has followed the text to its end, ``CLOSING`` tokens ago at most."""
        return 0 < self._behind == len(self._tokens) and self._num_off <= CLOSING

    def extend(self, token_ids: Sequence[int], *, grows: bool = False) -> None:
        """Adds tokens to the text's end, its last ones unless it ``grows``."""
        self._tokens = np.append(self._tokens, np.array(token_ids, np.int32))
        self._grows, ahead, self._ahead = grows, self._ahead, []
        self._next_search = 0
        self._advance(ahead)

    def follow(self, token_ids: Sequence[int]) -> None:
        """The answer goes on with ``token_ids``."""
        self._advance(token_ids)
        self.num_seen += len(token_ids)
        self._newest = [*self._newest, *token_ids][-MAX_MATCH:]

    def after(self, token_ids: Sequence[int]) -> Self:
        """Where the answer would be if it went on with ``token_ids``; a copy, which may look for
        the place. This text does not change.

        >>> text = TextMatch([1, 2, 3, 4, 5])
        >>> text.after([1, 2, 3]).rest(2), text.rest(2)
        ([4, 5], [1, 2])
        """
        ahead = copy.copy(self)
        ahead.follow(token_ids)
        return ahead

    def _advance(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            place = self._place
            if self._grows and place == len(self._tokens):
                self._ahead = [*self._ahead, token]  # compared with what will arrive
            elif place is not None and place < len(self._tokens) and self._tokens[place] == token:
                self._place = self._behind = place + 1
                self.num_covered += 1
                self.match_len = min(MAX_MATCH, self.match_len + (self.match_len > 0))
            else:
                if place is not None:
                    self._num_off = self._next_search = 0
                self._place = None
            if self._place is None:
                self._num_off += 1

    def rest(self, limit: int) -> Sequence[int]:
        """The text's next tokens, at most ``limit``; looks for the answer's place first."""
        if self._place is None and self._num_off >= self._next_search and self._newest:
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
        matches = self._matches()
        near, near_len = _first(matches, 1, behind, behind + self._num_off + NEAR)
        far, far_len = _first(matches, MIN_FAR, behind, num_tokens)
        before, before_len = _first(matches, MIN_FAR, 0, behind)
        if before_len > far_len:
            far, far_len = before, before_len
        place, length = (near, near_len) if near_len + 1 >= far_len else (far, far_len)
        if length:
            self.num_covered += min(length, self._num_off)
            self._place = self._behind = place
            self.match_len, self._num_off = length, 0
        self._next_search = self._num_off + 1 + self._num_off // PATIENCE

    def _matches(self) -> list[np.ndarray]:
        """Looks up the newest tokens: by number of them, int64 places behind them, ascending."""
        self.num_searched += len(self._tokens)
        found = np.flatnonzero(self._tokens == self._newest[-1])
        middle = np.searchsorted(found, self._behind)
        places = 1 + found[max(0, middle - MAX_PLACES) : middle + MAX_PLACES]
        matches = []
        for length, token in enumerate(self._newest[::-1], 1):
            places = places[places >= length]
            places = places[self._tokens[places - length] == token]
            if not len(places):
                break
            matches.append(places)
        return matches


def _first(matches: Sequence[np.ndarray], shortest: int, start: int, end: int) -> tuple[int, int]:
    """The first place in (start, end] that the longest match ends at, of ``shortest`` tokens at
    least, and its length; (0, 0) for none."""
    found = 0, 0
    for length, places in enumerate(matches[shortest - 1 :], shortest):
        at = np.searchsorted(places, start, "right")
        if at == len(places) or places[at] > end:
            break
        found = int(places[at]), length
    return found
