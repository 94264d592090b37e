"""Fenced blocks of code in Markdown that is still being written, by CommonMark's rules.

A fence belongs to the quotes and list items that it stands in, ends with them, and is none inside
HTML, so all of these are followed, line by line. Of other blocks it is enough whether the last line
was text that the next one may continue.

A line can be told when it ends, so the lines of both fences are code, and so is one that may still
become an opening fence.

Source: https://spec.commonmark.org/0.31.2/; definitions of links are text here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_CODE, _HTML, _TEXT = "code", "html", "text"
_QUOTE = 0
_QUOTE_MARK = re.compile(r" {0,3}> ?")
_ITEM_MARK = re.compile(r"( {0,3}(?:[-+*]|(\d{1,9})[.)]))( +|$)")
_BREAK = re.compile(r" {0,3}(?:(?:\* *){3,}|(?:- *){3,}|(?:_ *){3,})$")
_UNDERLINE = re.compile(r" {0,3}(?:=+|-+) *$")
_HEADING = re.compile(r" {0,3}#{1,6}(?: |$)")
_FENCE = re.compile(r" {0,3}(?:(`{3,})[^`]*$|(~{3,}))")
_LINE_END = re.compile(r"\r\n|\n|\r")
_BLANK, _RAW = r"^ *$", "script|pre|style|textarea"
_BLOCKS = (
    "address|article|aside|base|basefont|blockquote|body|caption|center|col|colgroup|dd|details|"
    "dialog|dir|div|dl|dt|fieldset|figcaption|figure|footer|form|frame|frameset|h[1-6]|head|header|"
    "hr|html|iframe|legend|li|link|main|menu|menuitem|nav|noframes|ol|optgroup|option|p|param|"
    "search|section|summary|table|tbody|td|tfoot|th|thead|title|tr|track|ul"
)
_VALUE = r"""\s*=\s*(?:[^"'=<>`\x00-\x20]+|'[^']*'|"[^"]*")"""
_TAG = rf"(?:[a-z][a-z0-9-]*(?:\s+[a-z_:][a-z0-9:._-]*(?:{_VALUE})?)*\s*/?|/[a-z][a-z0-9-]*\s*)>"
_HTML_STARTS = [
    (re.compile(f" {{0,3}}<{start}", re.IGNORECASE), end)
    for start, end in (
        (rf"(?:{_RAW})(?:\s|>|$)", rf"(?i)</(?:{_RAW})>"),
        ("!--", "-->"),
        (r"\?", r"\?>"),
        ("![a-z]", ">"),
        (r"!\[CDATA\[", r"\]\]>"),
        (rf"/?(?:{_BLOCKS})(?:\s|/?>|$)", _BLANK),
        (rf"{_TAG}\s*$", _BLANK),
    )
]
"""Beginnings of a line -> what the last line of such a block has; the last may not end a text."""


class _Open(NamedTuple):
    """The blocks that are open behind a line.

    containers: ``_QUOTE``, or of a list item the columns before its content; below 0 while it is
        empty.
    leaf: what the containers hold; "" for nothing that the next line may belong to.
    end: of code or HTML, a pattern of its last line.
    """

    containers: tuple[int, ...] = ()
    leaf: str = ""
    end: str = ""


@dataclass(slots=True)
class CodeBlocks:
    """Whether an answer is in a fenced block of code, behind the tokens that have been read.

    Attributes:
        num_tokens: read so far.
    """

    num_tokens: int = 0
    _blocks: _Open = _Open()
    _line: str = ""

    @property
    def is_open(self) -> bool:
        is_code = self._blocks.leaf == _CODE
        return is_code or _after(self._blocks, self._line.removesuffix("\r")).leaf == _CODE

    def read(self, texts: Sequence[str]) -> None:
        """Reads the texts of the tokens that follow."""
        self.num_tokens += len(texts)
        text = self._line + "".join(texts)
        held = text[-1:] if text.endswith("\r") else ""  # a "\n" may follow
        *lines, self._line = _LINE_END.split(text[: len(text) - len(held)])
        self._line += held
        for line in lines:
            self._blocks = _after(self._blocks, line)


def _after(blocks: _Open, line: str) -> _Open:
    """The blocks that are open behind a whole line."""
    containers = tuple(map(abs, blocks.containers))
    rest, depth = _within(blocks.containers, line.expandtabs(4))
    is_inside, is_text = depth == len(containers), blocks.leaf == _TEXT
    if is_inside and blocks.end:
        is_last = re.search(blocks.end, rest)
        return _Open(containers) if is_last else blocks._replace(containers=containers)
    opened = containers[:depth]
    if is_inside and is_text and _UNDERLINE.match(rest):
        return _Open(opened)
    while not _BREAK.match(rest) and (found := _opening(rest, ends_text=is_inside and is_text)):
        opened, rest = (*opened, found[0]), found[1]
        is_inside = is_text = False
    if _BREAK.match(rest) or _HEADING.match(rest) or not rest.strip():
        return _Open(opened)
    if fence := _FENCE.match(rest):
        mark = fence[1] or fence[2]
        return _Open(opened, _CODE, rf"^ {{0,3}}{mark[0]}{{{len(mark)},}} *$")
    for start, end in _HTML_STARTS[: -1 if is_text else None]:
        if start.match(rest):
            is_whole = end != _BLANK and re.search(end, rest)
            return _Open(opened) if is_whole else _Open(opened, _HTML, end)
    if is_text:  # goes on, whatever containers the line leaves out
        return _Open(containers, _TEXT)
    return _Open(opened, "" if rest.startswith("    ") else _TEXT)


def _within(containers: Sequence[int], line: str) -> tuple[str, int]:
    """What a line has inside the containers that it belongs to, and how many these are."""
    for depth, width in enumerate(containers):
        is_blank, mark = not line.strip(), _QUOTE_MARK.match(line)
        if width == _QUOTE:
            belongs, start = mark is not None, mark.end() if mark else 0
        else:
            start = min(abs(width), len(line))
            belongs = width > 0 if is_blank else not line[: abs(width)].strip()
        if not belongs:
            return line, depth
        line = line[start:]
    return line, len(containers)


def _opening(line: str, *, ends_text: bool) -> tuple[int, str] | None:
    """The quote or list item that a line begins with, and what follows in it."""
    if mark := _QUOTE_MARK.match(line):
        return _QUOTE, line[mark.end() :]
    mark = _ITEM_MARK.match(line)
    if mark is None:
        return None
    marker, number, spaces = mark.groups()
    is_empty = not line[mark.end() :].strip()
    if ends_text and (is_empty or number not in (None, "1")):
        return None
    if is_empty:
        return -len(marker) - 1, ""
    width = len(marker) + (len(spaces) if len(spaces) < 5 else 1)
    return width, line[width:]
