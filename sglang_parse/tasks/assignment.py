"""The demo pair's problems, or prompts of a file with a grader command."""

from __future__ import annotations

from pathlib import Path

from sglang_parse.client.ask import MAX_TOKENS
from sglang_parse.client.demo_pair import load_problems
from sglang_parse.client.records import Assignment, Item
from sglang_parse.tasks.prompts import file_assignment

FILE_MAX_TOKENS = 1024
"""Default answer length for prompts of a file, in tokens."""


def make_assignment(
    file: Path | None, grader: str, count: int, max_tokens: int | None
) -> Assignment:
    """Loads the problems and their grader.

    Args:
        file: JSONL file of prompts; None selects the demo pair's held-out problems.
        grader: command that grades the answers to the file's prompts.
        count: number of demo problems to generate.
        max_tokens: answer length; None selects the default.

    Raises:
        BenchError: the file or the grader cannot be used, or the demo pair is not here.
    """
    if file is not None:
        return file_assignment(file, grader, max_tokens or FILE_MAX_TOKENS)
    module = load_problems()
    problems = module.held_out_problems(count)
    items = [Item(str(number), problem.text, problem) for number, problem in enumerate(problems)]

    def grade(item: Item, text: str) -> float:
        return float(module.is_answer_right(item.reference, text))

    def locate(item: Item, text: str, finished: bool) -> int | None:
        return module.num_right_before_error(item.reference, text, finished=finished)

    title = "held-out problems of the demo pair"
    return Assignment(title, items, grade, max_tokens or MAX_TOKENS, locate)
