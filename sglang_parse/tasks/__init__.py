"""Tasks to grade answers by: items from a local file, and a grader by a package made for it.

Nothing here downloads: a missing file is an error that says where to get it.
"""

from __future__ import annotations

from pathlib import Path

from sglang_parse.client.ask import MAX_TOKENS
from sglang_parse.client.records import Assignment
from sglang_parse.tasks.base import Grader, Item, Options, Task, TaskError

DEMO_TASK = "demo"
__all__ = [
    "DEMO_TASK",
    "Grader",
    "Item",
    "Options",
    "Task",
    "TaskError",
    "find_task",
    "make_assignment",
    "task_names",
]


def make_assignment(
    name: str, file: Path | None, count: int, max_tokens: int | None, options: Options
) -> Assignment:
    """A task as it is asked.

    Args:
        name: a task's, or ``DEMO_TASK``.
        file: with the task's problems.
        count: how many the demo shall make; a file has as many as it has.
        max_tokens: room for an answer; None: the task's own.
        options: what the grader may need.

    Raises:
        TaskError: the task's file or its grader is not there.
    """
    if name == DEMO_TASK:
        from sglang_parse.tasks.demo import demo_assignment

        return demo_assignment(count, max_tokens or MAX_TOKENS)
    task = find_task(name)
    items = task.read(file)
    title = f"{task.title} ({task.note})" if task.note else task.title
    grade, make_locator = task.make_grader(options), task.make_locator
    locate = make_locator(options) if make_locator else None
    return Assignment(title, items, grade, max_tokens or task.max_tokens, locate)


def task_names() -> tuple[str, ...]:
    """Every task that has a file; the demo's problems are made, not read."""
    return tuple(_tasks())


def find_task(name: str) -> Task:
    """The task of that name.

    Raises:
        TaskError: there is none.
    """
    tasks = _tasks()
    if name not in tasks:
        raise TaskError(f"--task is {name!r}; known: {', '.join(tasks)}")
    return tasks[name]


def _tasks() -> dict[str, Task]:
    from sglang_parse.tasks import choice, code, dialogue, mathematics, prompts

    modules = (mathematics, choice, code, dialogue, prompts)
    return {task.name: task for module in modules for task in module.TASKS}
