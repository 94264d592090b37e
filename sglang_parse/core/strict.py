"""Classes of tokens that must be the target's own choice, whatever their verdict.

One threshold is lenient with facts and strict with wording: to an unsure target a draft's wrong
number is often as likely as a synonym is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sglang_parse.core.markdown import CodeBlocks
from sglang_parse.core.segment import HALF, MAX_HALVES
from sglang_parse.core.setting import shown

NONE, NUMBERS, CODE = "none", "numbers", "code"
CLASSES: dict[str, Callable[[str, bool], bool]] = {
    # Not isdigit: a wrong fraction, Roman or Chinese numeral is a wrong number, too.
    NUMBERS: lambda text, _in_code: any(map(str.isnumeric, text)),
    CODE: lambda _text, in_code: in_code,
}
"""Whether a token of this text, in a block of code or outside, belongs to a class."""


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
    """Parses 'numbers,code', a list of these names, or 'none'.

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
    code: CodeBlocks,
) -> Refusal | None:
    """Finds the first draft token that differs from the target's choice where one of the two
    belongs to a class; None if there is none.

    A token that ends inside a character belongs to every class: what it will be is not known yet.

    Args:
        draft: [m] draft tokens.
        choices: [>= m] the target's choice in place of each.
        text_of: as ``Segmenter.text_of``.
        code: of ``before``, as far as it was needed.
    """
    ahead: CodeBlocks | None = None  # read only where it is asked for, once
    for place, pair in enumerate(zip(draft, choices, strict=False) if names else ()):
        if pair[0] == pair[1]:
            continue
        context = [*before[-MAX_HALVES:], *draft[max(0, place - MAX_HALVES) : place]]
        texts = [text_of(token, context) for token in pair]
        if CODE in names:
            if ahead is None:
                code.read([text_of(token, ()) for token in before[code.num_tokens :]])
                ahead = replace(code)
            unread = draft[ahead.num_tokens - len(before) : place]
            ahead.read([text_of(token, ()) for token in unread])
        in_code = ahead is not None and ahead.is_open
        for name in names:
            if any(text.endswith(HALF) or CLASSES[name](text, in_code) for text in texts):
                return Refusal(place, name)
    return None
