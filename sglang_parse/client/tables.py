"""Terminal output: tables, progress bars."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TimeElapsedColumn
from rich.table import Table

from sglang_parse.client.sections import Cell, Grid, Sections

NAMES = ("", "server", "stage")
"""Headings of first columns that hold names."""


def make_table(title: str, headings: Sequence[str]) -> Table:
    """A table of right-aligned numbers; a first column of names is left-aligned."""
    table = Table(box=box.SIMPLE_HEAD, title=title, show_header=any(headings))
    for place, heading in enumerate(headings):
        is_name = place == 0 and heading in NAMES
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=is_name)
    return table


def grid_table(title: str, grid: Grid, columns: Sequence[int] | None = None) -> Table:
    """A grid, or some of its columns; small print is below its figure."""

    def chosen(cells: Sequence[Cell]) -> list[str]:
        lines = [cell if isinstance(cell, str) else "\n".join(filter(None, cell)) for cell in cells]
        return lines if columns is None else [lines[place] for place in columns]

    table = make_table(title, chosen(grid.headings))
    for row in grid.rows:
        table.add_row(*chosen(row))
    return table


def show_sections(console: Console, sections: Sections, headings: Sequence[str]) -> None:
    """Prints the tables below these headings, where there are any."""
    for heading in headings:
        for part in sections.get(heading, ()):
            if isinstance(part, Grid):
                console.print(grid_table(heading, part))


def make_progress(console: Console) -> Progress:
    """Progress bars with a title, a count and the elapsed time."""
    return Progress(
        *("{task.description:<34}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
        console=console,
    )


def add_bar(progress: Progress, title: str, total: int) -> TaskID:
    """Adds a bar. Without a terminal the title is printed, and the bar once at the end."""
    if not progress.console.is_terminal:
        progress.console.print(f"{title} ...")
    return progress.add_task(title, total=total)
