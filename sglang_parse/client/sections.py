"""Results described once, in sections: a page shows all, the terminal the tables of some."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import plotly.graph_objects as go

Cell = str | tuple[str, str]
"""A figure; with small print, such as its interval."""
Columns = dict[Cell, Callable[..., Cell]]
"""Heading -> makes the cell of a row's item."""
Shown = Sequence[int] | None
"""Columns that a terminal has room for; None: all, (): the table is the page's alone."""


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; ``style``: "low" is small print."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table; the first column has names. ``note``: small print below it, on a page."""

    headings: Sequence[Cell]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    shown: Shown = None

    @classmethod
    def of(
        cls, items: Iterable[tuple], columns: Columns, note: str = "", shown: Shown = None
    ) -> Grid:
        """A row for each item, of whose parts cells are made."""
        rows = [[make(*item) for make in columns.values()] for item in items]
        return cls([*columns], rows, note, shown)


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot; ``name`` is its id on the page. ``note``: small print below it."""

    name: str
    figure: go.Figure
    note: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Conditions by name: plain data."""

    facts: Mapping[str, Any]


Part = str | Text | Grid | Plot | Facts
"""A text alone is what a reader came for."""
Sections = Mapping[str, Sequence[Part]]
"""Heading -> what is below it."""


def filled(sections: Sections) -> Sections:
    """Without tables and plots of nothing, and headings above nothing."""

    def has_content(part: Part) -> bool:
        content = part.rows if isinstance(part, Grid) else part
        return bool(part.figure.data if isinstance(part, Plot) else content)

    found = {heading: [*filter(has_content, parts)] for heading, parts in sections.items()}
    return {heading: parts for heading, parts in found.items() if parts}


def with_interval(
    value: float, low: float, high: float, digits: int = 2, unit: str = ""
) -> tuple[str, str]:
    """A cell with an interval below the figure, which alone has the unit."""
    return f"{value:.{digits}f}{unit}", f"{low:.{digits}f} to {high:.{digits}f}"
