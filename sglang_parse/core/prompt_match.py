"""Finds where an answer copies: from its prompt, or from what it has written itself.

What code edits, tool calls, extraction and summaries output is in their prompt in parts. The newest
tokens are looked up in prompt and output; what follows the place is the next draft. A look-up goes
through all tokens once, and there is no index to build: at 100,000 tokens it takes 100 us.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_parse.core.text_match import TextMatch

MAX_MATCH = 64
"""Newest tokens that are looked up."""
KNOWN = 4
"""Newest tokens from which on a place is known well: near it, the next one is looked for."""
NEAR = 16
"""Tokens behind the last well-known place, beyond what was output since, that are near it."""
MAX_PLACES = 4096
"""Places of the two newest tokens that a look-up considers, the latest ones."""
FEW = 64
"""Places whose matches are measured together, the latest ones of the longest."""


class PromptMatch(TextMatch):
    """Prompt and output so far of one request, followed by its answer; it takes no other tokens.

    >>> text = PromptMatch([1, 2, 3, 4, 5, 9, 4])
    >>> text.follow([5])  # after 4: the prompt has both
    >>> text.rest(2), text.match_len
    ([9, 4], 2)

    Args:
        prompt_ids: the prompt's tokens; what is none, as the place of an image, matches nothing.
        vocab_size: tokens are below it.

    Attributes:
        num_seen: output tokens so far.
        match_len: newest tokens that are before the place, too; one more for a near place.
        num_searched: tokens that all look-ups so far went through.
    """

    is_at_end = False  # what is output joins it

    def __init__(self, prompt_ids: Sequence[int], vocab_size: int = 2**31 - 1) -> None:
        self._start = MAX_MATCH + len(prompt_ids)
        self._tokens = np.empty(self._start + self._start // 4 + 256, np.int32)
        self._tokens[:MAX_MATCH] = -1  # no token: what is before the first one matches nothing
        ids = np.asarray(prompt_ids, np.int64)
        is_token, places = (ids >= 0) & (ids < vocab_size), np.arange(len(ids))
        self._tokens[MAX_MATCH : self._start] = np.where(is_token, ids, -2 - places)
        self.num_searched = 0
        self.reset()

    def reset(self) -> None:
        """Forgets the output."""
        self._end, self.num_seen, self.match_len = self._start, 0, 0
        self._place: int | None = None
        self._is_near = False
        self._known: tuple[int, int] | None = None  # the last well-known place, and num_seen there

    def __len__(self) -> int:
        return self._end - MAX_MATCH

    def follow(self, token_ids: Sequence[int]) -> None:
        """The answer goes on with ``token_ids``."""
        if self._end + len(token_ids) > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * (self._end + len(token_ids)))
        self._tokens[self._end : self._end + len(token_ids)] = token_ids
        self._end += len(token_ids)
        for token in token_ids:
            self.num_seen += 1
            if self._place is None:
                continue
            if self._tokens[self._place] == token:
                self._enter_at(self._place + 1, self.match_len + 1, is_near=self._is_near)
            else:
                self._place, self.match_len = None, 0

    def rest(self, limit: int) -> Sequence[int]:
        """The tokens behind the place, at most ``limit``; looks for the place first."""
        if self._place is None and self.num_seen:
            self._look_up()
        if self._place is None:
            return ()
        rest = self._tokens[self._place : min(self._end, self._place + limit)]
        no_tokens = np.flatnonzero(rest < 0)
        return rest[: no_tokens[0] if len(no_tokens) else None].tolist()

    def follow_draft(self) -> None:
        """A whole draft was accepted: its length counts, as each of its tokens does."""

    def _enter_at(self, place: int, length: int, *, is_near: bool) -> None:
        self._place, self.match_len, self._is_near = place, length, is_near
        if length >= KNOWN or (is_near and length > 2):
            self._known = place, self.num_seen

    def _look_up(self) -> None:
        """Enters where the longest match of the newest tokens is, the latest place; instead, the
        first near place of the longest match there, if that is at most one token shorter."""
        tokens = self._tokens[: self._end]
        self.num_searched += len(self)
        is_last = tokens[:-1] == tokens[-1]  # without the newest token, which would match itself
        places = 1 + np.flatnonzero(is_last)
        if not len(places):
            return
        for back in range(2, MAX_MATCH + 1):
            if len(places) <= FEW:
                break
            longer = places[tokens[places - back] == tokens[-back]]
            if not len(longer):
                break
            places = longer[-MAX_PLACES:]
        behind, since = self._known or (0, self.num_seen + NEAR)  # then nothing is near
        near = is_last[behind : max(0, behind + self.num_seen - since + NEAR)]
        near = behind + 1 + np.flatnonzero(near)[:FEW]
        places = np.concatenate((near, places[-FEW:]))
        lengths = _lengths(tokens, places)
        at = len(places) - 1 - int(np.argmax(lengths[::-1]))
        if len(near):
            first = int(np.argmax(lengths[: len(near)]))
            if lengths[first] + 1 >= lengths[at]:
                return self._enter_at(int(places[first]), int(lengths[first]) + 1, is_near=True)
        return self._enter_at(int(places[at]), int(lengths[at]), is_near=False)


def _lengths(tokens: np.ndarray, places: np.ndarray) -> np.ndarray:
    """[P] tokens before each place that are the newest ones, too; MAX_MATCH at most."""
    back = np.arange(1, MAX_MATCH + 1)
    same = tokens[places[:, None] - back] == tokens[-back]
    return np.where(same.all(1), MAX_MATCH, same.argmin(1))
