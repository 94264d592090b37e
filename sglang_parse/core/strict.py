"""Classes of tokens that must be the target's own choice, whatever their verdict.

One threshold is lenient with facts and strict with wording: to an unsure target a draft's wrong
number is often as likely as a synonym is.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_parse.core.segment import HALF, MAX_HALVES
from sglang_parse.core.setting import shown

NONE = "none"


@dataclass(frozen=True, slots=True)
class StrictClass:
    """A class of tokens; ``member``: one of them, for people."""

    member: str
    holds: Callable[[str], bool]


def _is_number(text: str) -> bool:
    # Not isdigit: a wrong fraction, Roman or Chinese numeral is a wrong number, too.
    return any(map(str.isnumeric, text))


def _is_operator(text: str) -> bool:
    is_marker = text.startswith("<") and text.endswith(">") and any(map(str.isalpha, text))
    return not is_marker and any(c in "-*/%^&" or unicodedata.category(c) == "Sm" for c in text)


CLASSES = {
    "numbers": StrictClass("a number", _is_number),
    "operators": StrictClass("an operator", _is_operator),
}
"""Name -> what a token's text must be like."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A draft token that its class refuses.

    Attributes:
        place: its index in the draft.
        name: of the class.
    """

    place: int
    name: str


def parse_classes(value: object) -> tuple[str, ...]:
    """Parses 'numbers,operators', a list of these names, or 'none'.

    Raises:
        ValueError: the value is none of these.
    """
    names = value.split(",") if isinstance(value, str) else value
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        given = {name.strip() for name in names}
        if given <= CLASSES.keys() or given == {NONE}:
            return tuple(name for name in CLASSES if name in given)
    known = ", ".join(CLASSES)
    raise ValueError(f"got {shown(value)}; use {NONE}, or of {known}, with commas between them")


def find_refusal(
    before: Sequence[int],
    draft: Sequence[int],
    choices: Sequence[int],
    names: Sequence[str],
    text_of: Callable[[int, Sequence[int]], str],
) -> Refusal | None:
    """Finds the first draft token that differs from the target's choice where one of the two
    belongs to a class; None if there is none.

    A token that ends inside a character belongs to every class: what it will be is not known yet.

    Args:
        draft: [m] draft tokens.
        choices: [>= m] the target's choice in place of each.
        text_of: as ``Segmenter.text_of``.
    """
    for place, pair in enumerate(zip(draft, choices, strict=False) if names else ()):
        if pair[0] == pair[1]:
            continue
        context = [*before[-MAX_HALVES:], *draft[max(0, place - MAX_HALVES) : place]]
        texts = [text_of(token, context) for token in pair]
        for name in names:
            if any(text.endswith(HALF) or CLASSES[name].holds(text) for text in texts):
                return Refusal(place, name)
    return None
