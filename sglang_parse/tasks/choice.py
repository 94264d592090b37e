"""MMLU, MMLU-Pro and GPQA: the letter of the final answer, found by Math-Verify."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_parse.tasks.base import Grader, Item, Options, Task, need

LETTERS = "ABCDEFGHIJ"
INSTRUCTION = (
    "\n\nThink step by step, then end with a line 'Answer: X', where X is the letter of the "
    "right choice."
)


def choice_item(key: str, question: str, choices: Sequence[str], right: int) -> Item:
    """A question with lettered choices; the reference is (letter, number of choices).

    Raises:
        ValueError: no such choice.
    """
    if not 0 <= right < len(choices) <= len(LETTERS):
        raise ValueError(f"choice {right} of {len(choices)}")
    lines = [f"{letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=False)]
    text = "\n".join([question.strip(), "", *lines]) + INSTRUCTION
    return Item(key, text, (LETTERS[right], len(choices)))


def mmlu_item(row: Mapping[str, Any], number: int) -> Item:
    """``answer`` is the index into ``choices``."""
    return choice_item(f"{number}", row["question"], list(row["choices"]), int(row["answer"]))


def mmlu_pro_item(row: Mapping[str, Any], number: int) -> Item:
    """``answer`` is a letter; up to ten ``options``."""
    key = str(row.get("question_id", number))
    right = LETTERS.index(row["answer"])
    return choice_item(key, row["question"], list(row["options"]), right)


def gpqa_item(row: Mapping[str, Any], number: int) -> Item:
    """The right answer stands first in the file; its place here is drawn, the same every time."""
    wrong = [row[f"Incorrect Answer {n}"].strip() for n in (1, 2, 3)]
    places = random.Random(f"gpqa/{row['Question']}").sample(range(4), 4)
    choices = [[row["Correct Answer"].strip(), *wrong][place] for place in places]
    key = str(row.get("Record ID", number))
    return choice_item(key, row["Question"], choices, places.index(0))


def make_grader(options: Options) -> Grader:
    """Whether the final letter is the right one."""
    del options
    need("math_verify", "grading multiple choice")
    from math_verify import StringExtractionConfig, parse

    def grade(item: Item, texts: Sequence[str]) -> float:
        right, count = item.reference
        kind = StringExtractionConfig(strings=tuple(LETTERS[:count]), lowercase=False)
        found = parse(texts[0], [kind], extraction_mode="first_match")
        return float(bool(found) and found[0] == right)

    return grade


TASKS = (
    Task(
        "mmlu",
        "MMLU",
        "data set cais/mmlu, file all/test-00000-of-00001.parquet (question, choices, answer)",
        mmlu_item,
        make_grader,
    ),
    Task(
        "mmlu-pro",
        "MMLU-Pro",
        "data set TIGER-Lab/MMLU-Pro, file data/test-00000-of-00001.parquet "
        "(question, options, answer)",
        mmlu_pro_item,
        make_grader,
        max_tokens=2048,
    ),
    Task(
        "gpqa",
        "GPQA",
        "data set Idavidrein/gpqa (its page asks for consent), file gpqa_diamond.csv "
        "(Question, Correct Answer, Incorrect Answer 1 to 3)",
        gpqa_item,
        make_grader,
        max_tokens=2048,
    ),
)
