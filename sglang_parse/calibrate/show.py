"""What ``sglang-parse calibrate`` prints at the end."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from sglang_parse.calibrate.figures import (
    AtThreshold,
    Calibration,
    RuleFigures,
    Served,
    Share,
)
from sglang_parse.calibrate.report import WHAT
from sglang_parse.client.tables import make_table

MAX_ROWS = 12


def show_figures(console: Console, figures: Calibration, output: Path) -> None:
    """Tables, the result in plain words, where the files are."""
    own = figures.own
    console.print(thresholds_table(own))
    console.print(rules_table(figures))
    if figures.served:
        console.print(served_table(figures))
    console.print(verdict(figures), highlight=False)
    file = output / "calibration.json"
    if own.certified is not None:
        console.print(f"serve with it: --parse-threshold {file}", highlight=False)
    console.print(f"{file}\n{output / 'report.html'}", highlight=False)


def verdict(figures: Calibration) -> str:
    """The result in one sentence."""
    own, what = figures.own, WHAT[figures.loss]
    levels = f"alpha {100 * figures.alpha:g} %, delta {100 * figures.delta:g} %"
    if own.certified is None:
        strictest = own.thresholds[0]
        return (
            f"No threshold qualifies ({levels}): even at {strictest.threshold:g}, the strictest "
            f"tested, {strictest.loss.count} of {figures.requests} first drafts lose, and "
            f"{_allowed(figures)}. Nothing is promised. What helps: more requests, a larger "
            "alpha, another question, or a target that judges better."
        )
    return (
        f"Threshold {own.certified:g} is certified ({levels}): {own.errors} of {figures.requests} "
        f"first drafts lose there (one loses where it {what}), {figures.errors_allowed} may."
    )


def _allowed(figures: Calibration) -> str:
    if figures.errors_allowed < 0:
        return f"{figures.requests} requests are too few for any number to pass"
    return f"{figures.errors_allowed} may"


def thresholds_table(own: RuleFigures) -> Table:
    """Rows evenly spread over the grid, the certified threshold and its neighbours among them."""
    headings = ("threshold", "loss", "false accepts", "false rejects", "kept")
    table = make_table(f"first drafts under {own.rule}", (*headings, "speedup", "certified"))
    for row in _some(own):
        table.add_row(
            f"{row.threshold:.6g}",
            *(_share(row.loss), _share(row.false_accepts), _share(row.false_rejects)),
            *(f"{row.kept:.1%}", _speedup(row.speedup), "yes" if row.certified else "no"),
        )
    return table


def _some(own: RuleFigures) -> list[AtThreshold]:
    rows = own.thresholds
    step = max(1, len(rows) // MAX_ROWS)
    chosen = {*range(0, len(rows), step), len(rows) - 1}
    for place, row in enumerate(rows):
        if row.threshold == own.certified:
            chosen |= {place, min(place + 1, len(rows) - 1)}
    return [rows[place] for place in sorted(chosen)]


def rules_table(figures: Calibration) -> Table:
    """Every rule at the usual threshold and at its own certified one."""
    headings = ("", "threshold", "loss", "false accepts", "false rejects", "kept", "speedup")
    table = make_table("every rule on the same drafts", headings)
    for rule in figures.rules:
        for threshold in sorted({0.5, rule.certified or 0.5}):
            row = rule.at(threshold)
            mark = ", certified" if threshold == rule.certified else ""
            table.add_row(
                f"{rule.rule}{mark}",
                f"{threshold:.6g}",
                *(_share(row.loss), _share(row.false_accepts), _share(row.false_rejects)),
                *(f"{row.kept:.1%}", _speedup(row.speedup)),
            )
    return table


def served_table(figures: Calibration) -> Table:
    headings = ("threshold", "right", "plain right", "wrong where plain is right")
    title = f"whole answers under {figures.rule}; difference in points"
    table = make_table(title, (*headings, "bound", "difference", "speedup"))
    for row in figures.served:
        table.add_row(
            f"{row.threshold:.6g}",
            *(f"{row.right.share:.1%}", f"{row.plain_right.share:.1%}"),
            *(_share(row.wrong_where_plain_right), f"{row.bound:.2%}"),
            *(difference(row), _speedup(row.speedup)),
        )
    return table


def difference(row: Served) -> str:
    """In percentage points, with its interval."""
    middle, low, high = (
        f"{100 * value:+.2f}" for value in (row.difference, row.difference_low, row.difference_high)
    )
    return f"{middle} ({low} to {high})"


def _share(share: Share) -> str:
    """In percent, the exact interval below it."""
    if not share.total:
        return ""
    return f"{share.share:.2%}\n{100 * share.low:.1f}-{100 * share.high:.1f}"


def _speedup(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"
