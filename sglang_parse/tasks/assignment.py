"""The demo pair's problems, or prompts of a file with a grader command."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import ModuleType

from sglang_parse.client.ask import MAX_TOKENS
from sglang_parse.client.demo_pair import load_problems
from sglang_parse.client.prompts import read_prompts
from sglang_parse.client.records import Assignment, Item
from sglang_parse.tasks.prompts import file_assignment

FILE_MAX_TOKENS = 1024
"""Default answer length for prompts of a file, in tokens."""


def make_assignment(
    file: Path | None,
    grader: str,
    count: int,
    max_tokens: int | None,
    *,
    is_training: bool = False,
) -> Assignment:
    """Loads the file's prompts and their grader, or so many of the demo pair's problems:
    ``is_training`` ones, which no other program grades, or held-out ones."""
    if file is not None:
        return file_assignment(file, grader, max_tokens or FILE_MAX_TOKENS)
    module = load_problems()
    title, items = _demo_items(module, count, is_training)

    def grade(item: Item, text: str) -> float:
        return float(module.is_answer_right(item.reference, text))

    def locate(item: Item, text: str, finished: bool) -> int | None:
        return module.num_right_before_error(item.reference, text, finished=finished)

    return Assignment(title, items, grade, max_tokens or MAX_TOKENS, locate)


def prompts_assignment(file: Path | None, count: int, max_tokens: int | None) -> Assignment:
    """Loads training problems without a grader: every answer gets 0."""
    if file is not None:
        title, items, limit = file.name, read_prompts(file), FILE_MAX_TOKENS
    else:
        title, items = _demo_items(load_problems(), count, is_training=True)
        limit = MAX_TOKENS
    return Assignment(title, items, lambda *_: 0.0, max_tokens or limit)


def data_set(task: Assignment, count: int | None = None) -> str:
    """Names a task, or its first problems, with a digest of their texts."""
    texts = [item.text for item in task.items[:count]]
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
    return f"{task.title} ({len(texts)} problems, {digest})"


def _demo_items(module: ModuleType, count: int, is_training: bool) -> tuple[str, list[Item]]:
    draw = module.training_problems if is_training else module.held_out_problems
    items = [Item(str(number), problem.text, problem) for number, problem in enumerate(draw(count))]
    return f"{'training' if is_training else 'held-out'} problems of the demo pair", items
