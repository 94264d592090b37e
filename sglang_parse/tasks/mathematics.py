"""GSM8K and MATH-500: final answers, compared by Math-Verify."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_parse.tasks.base import Grader, Item, Options, Task, need

INSTRUCTION = "\n\nReason step by step, and put the final answer into \\boxed{}."


def gsm8k_item(row: Mapping[str, Any], number: int) -> Item:
    """``answer`` ends in ``#### <number>``."""
    _, mark, final = str(row["answer"]).rpartition("####")
    if not mark:
        raise ValueError("answer has no ####")
    return Item(f"{number}", row["question"] + INSTRUCTION, final.strip().replace(",", ""))


def math_item(row: Mapping[str, Any], number: int) -> Item:
    """``answer`` is LaTeX without a dollar sign."""
    key = str(row.get("unique_id", number))
    return Item(key, row["problem"] + INSTRUCTION, str(row["answer"]))


def make_grader(options: Options) -> Grader:
    """Whether the final answer equals the reference, as mathematics and not as text."""
    del options
    need("math_verify", "grading mathematics")
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    kinds = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())

    def grade(item: Item, texts: Sequence[str]) -> float:
        gold = parse(f"${item.reference}$", kinds)
        return float(verify(gold, parse(texts[0], kinds)))

    return grade


TASKS = (
    Task(
        "gsm8k",
        "GSM8K",
        "data set openai/gsm8k, file main/test-00000-of-00001.parquet, or test.jsonl of "
        "openai/grade-school-math (1,319 rows with question, answer)",
        gsm8k_item,
        make_grader,
        max_tokens=512,
    ),
    Task(
        "math-500",
        "MATH-500",
        "data set HuggingFaceH4/MATH-500, file test.jsonl (500 rows with problem, answer)",
        math_item,
        make_grader,
        max_tokens=2048,
    ),
)
