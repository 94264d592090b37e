"""What programs show on a terminal: tables, figures with their marks, bars of progress."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from sglang_parse.client.figures import Goal

NAMES = ("", "server", "stage")
"""Headings of first columns that hold names."""


def make_table(title: str, headings: Sequence[str]) -> Table:
    """A table of figures: numbers stand to the right, a first column of names to the left."""
    table = Table(box=box.SIMPLE_HEAD, title=title, show_header=any(headings))
    for place, heading in enumerate(headings):
        is_name = place == 0 and heading in NAMES
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=is_name)
    return table


def show_goals(console: Console, goals: Iterable[Goal]) -> None:
    """The figures to reach."""
    for goal in goals:
        mark = "[green]PASS[/]" if goal.reached else "[red]FAIL[/]"
        console.print(f"{mark} {goal.name}: {goal.value:.3f}, wanted {goal.wanted}")


def make_progress(console: Console) -> Progress:
    """Bars with a title, a count and the time so far."""
    return Progress(
        TextColumn("{task.description:<34}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def add_bar(progress: Progress, title: str, total: int) -> TaskID:
    """A bar. Where the output is no terminal it is drawn once, at the end; its title is said."""
    if not progress.console.is_terminal:
        progress.console.print(f"{title} ...")
    return progress.add_task(title, total=total)
