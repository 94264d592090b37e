"""Splits a draft into segments: lines, sentences, or every N tokens.

Works on the decoded text of single tokens, so segments end between tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Written as escapes: the wide marks look like "!?" in many fonts and editors.
_WIDE_MARKS = "\u3002\uff01\uff1f"  # ideographic full stop, fullwidth ! and ?
_CLOSING = "\"')\\]\u2019\u201d\u00bb\u300d\u300f\uff09\u3011"  # quotes and brackets, ] escaped
_SENTENCE_END = re.compile(f"[.!?{_WIDE_MARKS}][{_CLOSING}]*$")
_WIDE_END = re.compile(f"[{_WIDE_MARKS}][{_CLOSING}]*$")
_SENTENCE_CONTINUES = re.compile(f"[.!?{_WIDE_MARKS}{_CLOSING}]")
HALF = "\ufffd"
"""Decoded in place of a character whose bytes are incomplete."""
_MARK_PIECES = 3
"""Pieces searched for a sentence's end: a closing quote may be a separate token."""
MAX_HALVES = 3
"""Tokens before one that may hold the first bytes of its character."""


@dataclass(frozen=True, slots=True)
class SegmentRule:
    """Where segments end. ``num_tokens`` is set for kind ``tokens`` only."""

    kind: str
    num_tokens: int = 0

    @classmethod
    def parse(cls, text: str) -> SegmentRule:
        """Parses ``line``, ``sentence`` or ``tokens:N`` (N >= 1).

        Raises:
            ValueError: the text is none of these.
        """
        if text in ("line", "sentence"):
            return cls(text)
        match = re.fullmatch(r"tokens:([1-9][0-9]*)", text)
        if match:
            return cls("tokens", int(match[1]))
        raise ValueError(f"expected 'line', 'sentence' or 'tokens:N' with N >= 1, got {text!r}")

    def __str__(self) -> str:
        return f"tokens:{self.num_tokens}" if self.kind == "tokens" else self.kind


def segment_ends(pieces: Sequence[str], rule: SegmentRule) -> list[int]:
    """Returns the ascending end offsets of the complete segments, in ``1..len(pieces)``; a piece is
    the decoded text of one token.

    Blank lines belong to the segment before them, so that a paragraph break is one end, not two.
    Leading blank lines are not a segment, because a draft may start between segments.
    """
    if rule.kind == "tokens":
        return list(range(rule.num_tokens, len(pieces) + 1, rule.num_tokens))
    closes = _closes_line if rule.kind == "line" else _closes_sentence
    ends: list[int] = []
    is_blank = True
    for index, piece in enumerate(pieces):
        is_blank = is_blank and not piece.strip()  # since the last end
        if not is_blank and closes(pieces, index):
            ends.append(index + 1)
            is_blank = True
        elif is_blank and ends and "\n" in piece:
            ends[-1] = index + 1
    return ends


def _closes_line(pieces: Sequence[str], index: int) -> bool:
    return pieces[index].rstrip(" \t").endswith("\n")


def _closes_sentence(pieces: Sequence[str], index: int) -> bool:
    if _closes_line(pieces, index):
        return True
    piece = pieces[index]
    recent = "".join(pieces[max(0, index + 1 - _MARK_PIECES) : index + 1])
    if not piece.strip() or not _SENTENCE_END.search(recent.rstrip()):
        return False
    # "3." may be the start of "3.14", so a sentence ends only before whitespace, except after a
    # wide mark, which no space follows. A mark at the end of the text is undecided, unless the
    # piece itself ends with whitespace.
    if piece != piece.rstrip():
        return True
    following = "".join(pieces[index + 1 : index + 2])
    if following[:1].isspace():
        return True
    ends_wide = following and _WIDE_END.search(recent)
    return bool(ends_wide) and not _SENTENCE_CONTINUES.match(following)


def prefix_ends(
    pieces: Sequence[str], rule: SegmentRule, *, finished: bool, max_prefixes: int
) -> list[int]:
    """Returns the ends of the prefixes to verify, as ascending draft offsets.

    The end of a finished draft is always included. An unfinished last segment is not (a verdict on
    half a line is unreliable), unless it is the only one.

    Args:
        pieces: decoded text of each draft token.
        finished: nothing follows the draft: the answer or the request's length limit ends there.
        max_prefixes: maximum number of prefixes; more segments are merged evenly.
    """
    if not pieces:
        return []
    ends = segment_ends(pieces, rule)
    if (finished or not ends) and (not ends or ends[-1] != len(pieces)):
        ends.append(len(pieces))
    return evenly_spaced(ends, max_prefixes)


def evenly_spaced(ends: Sequence[int], max_count: int) -> list[int]:
    """Returns at most ``max_count`` of ``ends``, evenly spaced, including the last."""
    count = len(ends)
    if count <= max_count:
        return list(ends)
    return [ends[(k + 1) * count // max_count - 1] for k in range(max_count)]


class Segmenter:
    def __init__(self, tokenizer: Any, rule: SegmentRule) -> None:
        self.rule, self._tokenizer = rule, tokenizer
        self._pieces: dict[int, str] = {}

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the text of each token inside a text; some tokenizers drop a leading space."""
        for token in token_ids:
            if token not in self._pieces:
                once, twice = (self._tokenizer.decode([token] * count) for count in (1, 2))
                self._pieces[token] = twice[len(once) :]
        return [self._pieces[token] for token in token_ids]

    def text_of(self, token: int, before: Sequence[int]) -> str:
        """Returns the text of a token, with the character that it completes; ends with ``HALF`` if
        it ends inside a character."""
        (piece,) = self.pieces([token])
        if HALF not in piece:
            return piece
        context = list(before[-MAX_HALVES:])
        start, whole = map(self._tokenizer.decode, (context, [*context, token]))
        return whole[len(start.rstrip(HALF)) :]

    def ends_in(self, token_ids: Sequence[int], start: int) -> bool:
        """Returns whether a segment ends in ``token_ids[start:]``; of what is before, the last few
        tokens count."""
        recent = token_ids[max(0, start - _MARK_PIECES) : start]
        known, found = (
            segment_ends(self.pieces(ids), self.rule)
            for ids in (recent, [*recent, *token_ids[start:]])
        )
        return bool({*found} - {*known})

    def ends(self, token_ids: Sequence[int]) -> list[int]:
        """Returns as ``segment_ends``, for token ids."""
        return segment_ends(self.pieces(token_ids), self.rule)


def whole_segments(length: int, ends: Sequence[int]) -> int:
    """Returns the next segment's end if it is at most twice as far, else the last one's: a verdict
    on half a segment is unreliable. The length itself where a segment is longer."""
    later = next((end for end in ends if length <= end <= 2 * length), 0)
    return later or max((end for end in ends if end <= length), default=length)
