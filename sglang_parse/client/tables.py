"""Terminal output: tables, progress bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TimeElapsedColumn
from rich.table import Table

from sglang_parse.client.page import render_report
from sglang_parse.client.program import write_json
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


def grid_table(title: str, grid: Grid) -> Table:
    """A grid as a terminal shows it; small print is below its figure."""

    def chosen(cells: Sequence[Cell]) -> list[str]:
        lines = [cell if isinstance(cell, str) else "\n".join(filter(None, cell)) for cell in cells]
        return lines if grid.shown is None else [lines[place] for place in grid.shown]

    table = make_table(title, chosen(grid.headings))
    for row in grid.rows:
        table.add_row(*chosen(row))
    return table


def publish(console: Console, file: Path, content: Any, title: str, sections: Sections) -> None:
    """Writes a file of JSON and report.html beside it; prints the tables that a terminal has room
    for, the results in sentences, and where the files are."""
    page = file.with_name("report.html")
    write_json(file, content)
    page.write_text(render_report(title, sections), encoding="utf-8")
    show(console, sections)
    console.print(file, page, sep="\n", highlight=False)


def show(console: Console, sections: Sections) -> None:
    """Prints the tables that a terminal has room for, and the results in sentences."""
    parts = [(heading, part) for heading, found in sections.items() for part in found]
    for heading, part in parts:
        if isinstance(part, Grid) and part.shown != ():
            console.print(grid_table(heading, part))
    for _, part in parts:
        if isinstance(part, str):
            console.print(part, highlight=False, markup=False)


def make_progress(console: Console) -> Progress:
    """Progress bars with a title, a count and the elapsed time."""
    return Progress(
        "{task.description:<34}",
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def add_bar(progress: Progress, title: str, total: int) -> TaskID:
    """Adds a bar. Without a terminal the title is printed, and the bar once at the end."""
    if not progress.console.is_terminal:
        progress.console.print(f"{title} ...")
    return progress.add_task(title, total=total)
