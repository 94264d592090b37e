"""The demo pair's own problems: made, not read, and graded by their one right answer."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_parse.bench.tasks.base import Grader, Item


def demo_items(count: int) -> tuple[list[Item], Grader]:
    """Held-out problems and their grader.

    Raises:
        DemoError: not in a checkout of the repository.
    """
    from sglang_parse.bench.demo.run import load_problems

    module = load_problems()
    items = [
        Item(str(number), problem.text, problem)
        for number, problem in enumerate(module.held_out_problems(count))
    ]

    def grade(item: Item, texts: Sequence[str]) -> float:
        return float(module.is_answer_right(item.reference, texts[0]))

    return items, grade
