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


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; ``style``: "low" is small print, "result" is what a reader came for."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table; the first column has names. ``note``: small print below it."""

    headings: Sequence[Cell]
    rows: Sequence[Sequence[Cell]]
    note: str = ""

    @classmethod
    def of(cls, items: Iterable[tuple], columns: Columns, note: str = "") -> Grid:
        """A row for each item, of whose parts cells are made."""
        rows = [[make(*item) for make in columns.values()] for item in items]
        return cls([*columns], rows, note)


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


Part = Text | Grid | Plot | Facts
Sections = Mapping[str, Sequence[Part]]
"""Heading -> what is below it."""


def with_interval(
    value: float, low: float, high: float, digits: int = 2, unit: str = ""
) -> tuple[str, str]:
    """A cell with an interval below the figure, which alone has the unit."""
    return f"{value:.{digits}f}{unit}", f"{low:.{digits}f} to {high:.{digits}f}"
