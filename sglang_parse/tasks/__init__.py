"""Graded problems: those of the demo pair, or prompts of a file with a grader command."""

from __future__ import annotations

from pathlib import Path

from sglang_parse.client.ask import MAX_TOKENS
from sglang_parse.client.records import Assignment

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
    if file is None:
        from sglang_parse.tasks.demo import demo_assignment

        return demo_assignment(count, max_tokens or MAX_TOKENS)
    from sglang_parse.tasks.prompts import file_assignment

    return file_assignment(file, grader, max_tokens or FILE_MAX_TOKENS)
