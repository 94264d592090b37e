"""The demo pair's held-out problems, generated here and graded by their one right answer."""

from __future__ import annotations

from sglang_parse.client.ask import MAX_TOKENS
from sglang_parse.client.demo_pair import load_problems
from sglang_parse.client.records import Assignment, Item


def demo_assignment(count: int, max_tokens: int = MAX_TOKENS) -> Assignment:
    """Generates ``count`` held-out problems.

    Raises:
        BenchError: this is no checkout of the repository.
    """
    module = load_problems()
    items = [
        Item(str(number), problem.text, problem)
        for number, problem in enumerate(module.held_out_problems(count))
    ]

    def grade(item: Item, text: str) -> float:
        return float(module.is_answer_right(item.reference, text))

    def locate(item: Item, text: str, finished: bool) -> int | None:
        return module.num_right_before_error(item.reference, text, finished=finished)

    return Assignment("held-out problems of the demo pair", items, grade, max_tokens, locate)
