"""What ``sglang-parse compare`` prints at the end: one table and the figures to reach."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from sglang_parse.client.records import PLAIN
from sglang_parse.client.tables import make_table, show_goals
from sglang_parse.compare.figures import Comparison, Spread, VariantFigures
from sglang_parse.compare.quality import Quality


def show_figures(console: Console, figures: Comparison, output: Path) -> None:
    """The table, the figures to reach if there are any, where the files are."""
    console.print(figures_table(figures))
    show_goals(console, figures.checks)
    for goal in figures.checks:
        if not goal.reached:
            console.print(f"missed by {goal.missed_by:.0%}: {goal.name}")
    for figure in figures.ways:
        if figure.time is not None:
            times = figure.time.ms_per_request.items()
            spent = ", ".join(f"{stage} {ms:.0f}" for stage, ms in times)
            console.print(f"ms per request of {figure.variant.label}: {spent}", highlight=False)
    console.print(f"{output / 'results.json'}\n{output / 'report.html'}")


def figures_table(figures: Comparison) -> Table:
    """One row per way."""
    concurrencies = sorted({speed.concurrency for f in figures.ways for speed in f.speeds})
    headings = ("", *(f"{concurrency} at a time" for concurrency in concurrencies), "exact", "p")
    table = make_table("output tokens/s and speedup over the plain target", headings)
    for figure in figures.ways:
        speeds = [_speed(figure, concurrency) for concurrency in concurrencies]
        table.add_row(figure.variant.label, *speeds, *_quality(figure.quality))
    return table


def _speed(figure: VariantFigures, concurrency: int) -> str:
    speed = figure.speed_at(concurrency)
    if speed is None:
        return ""
    over = speed.over.get(PLAIN)
    return f"{speed.tokens_per_s.median:.0f}" + (f" ({spread(over)})" if over else "")


def spread(value: Spread) -> str:
    """A speedup with its range."""
    return f"{value.median:.2f}x, {value.low:.2f}-{value.high:.2f}"


def _quality(quality: Quality | None) -> tuple[str, str]:
    if quality is None or quality.score is None:
        return "not graded", ""
    p = "" if quality.test is None else f"{quality.test.p_value:.2g}"
    return f"{quality.score:.1%} of {quality.problems}", p
