"""Counts the tokens of the built-in questions in each family's chat template.

Words are counted with a real tokenizer that comes with SGLang, Mistral's Tekken (131,072 tokens);
special tokens count once. SmolLM2's tokenizer (ChatML, 49,152 tokens) gives the same counts for
`chatml_short`, 24 and 21 (checked in November 2026).
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import mistral_common
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from sglang_parse.core.question import QuestionWording, question_file, render_question
from support.chat_families import FAMILIES, Family


class Rows(NamedTuple):
    """Tokens of a question about an unfinished answer, a finished one, and reasoning (or 0)."""

    partial: int
    complete: int
    thinking: int


def families_of(question: str) -> list[Family]:
    """Returns the families of a built-in question; ChatML for `default`."""
    long = question.removesuffix("_short")
    found = [family for family in FAMILIES.values() if family.question == long]
    return found or [FAMILIES["chatml"]]


def rows_of(question: str, family: Family) -> Rows:
    """Returns the rows that each prefix adds to a verify pass."""
    tokenizer = family.tokenizer()
    wording = QuestionWording.read(question_file(question))
    tokenizer.add_tokens([wording.accept, wording.reject])  # single tokens in real vocabularies
    rendered = render_question(tokenizer, wording)
    thinking = rendered.thinking

    def count(ids: tuple[int, ...]) -> int:
        return _num_tokens(tokenizer.decode(ids), family)

    suffix_ids = thinking.line_end_ids + thinking.suffix_ids if thinking else ()
    return Rows(count(rendered.partial_ids), count(rendered.complete_ids), count(suffix_ids))


def _num_tokens(text: str, family: Family) -> int:
    marks = family.special + family.thinking
    pieces = re.split(f"({'|'.join(map(re.escape, marks))})", text)
    return sum(1 if piece in marks else _num_word_tokens(piece) for piece in pieces if piece)


def _num_word_tokens(text: str) -> int:
    return len(_tekken().encode(text, bos=False, eos=False))


@cache
def _tekken() -> Any:
    folder = Path(mistral_common.__file__).parent / "data"
    return Tekkenizer.from_file(str(folder / "tekken_240911.json"))
