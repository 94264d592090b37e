"""Cut a draft into segments at its natural ends: lines, sentences, or every N tokens.

Pure: works on the decoded text of single tokens, so that cuts always fall between tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

# Written as escapes: the wide marks look like "!?" in many fonts and editors.
_WIDE_MARKS = "\u3002\uff01\uff1f"  # ideographic full stop, fullwidth ! and ?
_CLOSING = "\"')\\]\u2019\u201d\u00bb\u300d\u300f\uff09\u3011"  # quotes and brackets, ] escaped
_SENTENCE_END = re.compile(f"[.!?{_WIDE_MARKS}][{_CLOSING}]*$")
_WIDE_END = re.compile(f"[{_WIDE_MARKS}][{_CLOSING}]*$")
_SENTENCE_GOES_ON = re.compile(f"[.!?{_WIDE_MARKS}{_CLOSING}]")
_TAIL = 3
"""Pieces in which a sentence's mark is looked for: a closing quote may be its own token."""


@dataclass(frozen=True, slots=True)
class SegmentRule:
    """Where a segment may end. ``num_tokens`` is set for kind ``tokens`` only."""

    kind: str
    num_tokens: int = 0

    @classmethod
    def parse(cls, text: str) -> SegmentRule:
        """Read ``line``, ``sentence`` or ``tokens:N`` (N >= 1).

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
    """Offsets after which a segment ends, ascending, each in ``1..len(pieces)``.

    Args:
        pieces: decoded text of each token, in order.
        rule: where segments end. Blank lines that follow an end belong to the segment before
            it, so that a paragraph break is one cut and not two; blank lines at the very start
            close nothing, because a draft starts behind a cut.

    The last offset is not ``len(pieces)`` unless the text ends there by the rule: what follows
    the last end is an unfinished segment, and the caller decides what to do with it.
    """
    if rule.kind == "tokens":
        return list(range(rule.num_tokens, len(pieces) + 1, rule.num_tokens))
    closes = _closes_line if rule.kind == "line" else _closes_sentence
    ends: list[int] = []
    is_blank = True  # nothing but white space since the last end
    for index, piece in enumerate(pieces):
        is_blank = is_blank and not piece.strip()
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
    tail = "".join(pieces[max(0, index + 1 - _TAIL) : index + 1])
    if not piece.strip() or not _SENTENCE_END.search(tail.rstrip()):
        return False
    # "3." may be the start of "3.14": a sentence ends only before white space, except after a
    # wide mark, which no space follows. A mark at the very end of the text is undecided, unless
    # the piece brings its own white space.
    if piece != piece.rstrip():
        return True
    following = "".join(pieces[index + 1 : index + 2])
    if following[:1].isspace():
        return True
    ends_wide = following and _WIDE_END.search(tail)
    return bool(ends_wide) and not _SENTENCE_GOES_ON.match(following)


def prefix_ends(
    pieces: Sequence[str], rule: SegmentRule, *, finished: bool, max_prefixes: int
) -> list[int]:
    """The prefixes of a draft that one verification pass judges.

    Args:
        pieces: decoded text of each draft token.
        rule: where segments end.
        finished: nothing follows the draft, so the last offset is an end like any other: the draft
            model ended its answer, or the request's length limit ended the draft.
        max_prefixes: at most this many prefixes; more segments are merged into even groups.

    Returns:
        Ascending offsets into the draft. The end of a finished draft is always one of them. An
        unfinished last segment is left out (a verdict on half a line is worth little), unless
        it is all there is.
    """
    if not pieces:
        return []
    ends = segment_ends(pieces, rule)
    if (finished or not ends) and (not ends or ends[-1] != len(pieces)):
        ends.append(len(pieces))
    return evenly_spaced(ends, max_prefixes)


def evenly_spaced(ends: Sequence[int], max_count: int) -> list[int]:
    """Keep at most ``max_count`` of ``ends``, evenly spaced, the last one always."""
    count = len(ends)
    if count <= max_count:
        return list(ends)
    return [ends[(k + 1) * count // max_count - 1] for k in range(max_count)]


def first_segment_end(pieces: Sequence[str], rule: SegmentRule, num_new: int) -> int | None:
    """Offset after which the segment that starts with ``pieces[0]`` ends; None while it goes on.

    Args:
        num_new: pieces at the end that were not looked at before; it did not end before them.
    """
    if rule.kind == "tokens":
        return rule.num_tokens if len(pieces) >= rule.num_tokens else None
    known = max(0, len(pieces) - num_new - _TAIL)  # the last one's end may have been undecided
    while known and not pieces[known].strip():  # an end needs more than white space before it
        known -= 1
    ends = segment_ends(pieces[known:], rule)
    return known + ends[0] if ends else None
