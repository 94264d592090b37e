"""Tasks to grade answers by: items from a local file, and a grader by a package made for it.

Nothing here downloads: a missing file is an error that says where to get it.
"""

from __future__ import annotations

from sglang_parse.bench.tasks.base import Grader, Item, Options, Task, TaskError

__all__ = ["Grader", "Item", "Options", "Task", "TaskError", "find_task", "task_names"]


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
    from sglang_parse.bench.tasks import choice, code, dialogue, mathematics

    modules = (mathematics, choice, code, dialogue)
    return {task.name: task for module in modules for task in module.TASKS}
