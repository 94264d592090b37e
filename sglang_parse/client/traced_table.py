"""A traced answer as a table on the terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from sglang_parse.client.traced import (
    ACCEPTED,
    CONTRADICTED,
    DROPPED,
    REJECTED,
    UNVERIFIED,
    ExplainedAnswer,
    Segment,
)

_STYLES = {
    ACCEPTED: "green",
    REJECTED: "bold red strike",
    DROPPED: "dim strike",
    UNVERIFIED: "dim italic",
}


def answer_table(answer: ExplainedAnswer, title: str) -> Table:
    """A row per segment: its model, text, verdict and status."""
    table = Table(box=box.SIMPLE_HEAD, title=title)
    for name in ("model", "text", "verdict", "mass", "status"):
        table.add_column(name, justify="right" if name in ("verdict", "mass") else "left")
    _add_target(table, answer.before)
    for one in answer.rounds:
        for segment in one.segments:
            _add_segment(table, segment)
        _add_target(table, one.target_text)
    return table


def _add_target(table: Table, text: str) -> None:
    if text:
        table.add_row("target", Text(text.rstrip("\n"), "cyan"), "", "", "")


def _add_segment(table: Table, segment: Segment) -> None:
    style = _STYLES[segment.status]
    numbers = [
        Text("" if value is None else f"{value:.{places}f}", style.replace(" strike", ""))
        for value, places in ((segment.verdict, 4), (segment.mass, 2))
    ]
    status = f"{segment.status}{CONTRADICTED if segment.contradicted else ''}"
    if segment.refused:
        status += f" (refused: {segment.refused})"
    text = Text(style=style)
    for run in segment.runs:
        text.append(run.text, "underline" if run.target else "")
    text.rstrip()
    table.add_row("draft", text, *numbers, status)
