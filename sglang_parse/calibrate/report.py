"""Figures in words and tables: calibration.json, the terminal, and what the page shows too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from sglang_parse.calibrate.certify import DEFAULT_THRESHOLD, Proportion
from sglang_parse.calibrate.figures import AtThreshold, Calibration, loosest_certified
from sglang_parse.client.tables import make_table
from sglang_parse.core.certificate import Certificate

GUARANTEE = (
    "With confidence {confidence:g} over the draw of the calibration set: at most a fraction "
    "{alpha:g} of the first drafts of requests exchangeable with these {event}, at this threshold "
    "and at every stricter one. Not covered: later rounds of an answer (the check by whole answers "
    "bounds those), other data, other models, other questions."
)
EVENTS = {
    "token": "have their first wrong token accepted",
    "answer": "are accepted whole with a wrong answer",
}
_CONDITIONS = (
    *("date", "minutes", "machine", "versions", "server"),
    *("max_tokens", "pilot", "served", "concurrency"),
)
KEYS = {
    "guarantee": "the certificate in words",
    **dict.fromkeys((f"conditions.{name}" for name in _CONDITIONS), "conditions of the run"),
}
"""Keys of ``content`` beside the certificate's and the figures' -> meaning."""
Table = tuple[Sequence[str], list[tuple[str, ...]]]
"""Headings and rows; a cell's further lines, if any, qualify its first."""


def content(
    figures: Calibration, certificate: Certificate, conditions: dict[str, Any]
) -> dict[str, Any]:
    """``calibration.json`` as plain data; not rounded, verdicts differ in the fourth place."""
    return {
        **certificate.model_dump(),
        "guarantee": guarantee(certificate),
        "conditions": conditions,
        "results": asdict(figures),
    }


def guarantee(certificate: Certificate) -> str:
    if certificate.threshold is None:
        return "No threshold qualifies: there is no guarantee."
    return GUARANTEE.format(
        confidence=1 - certificate.delta,
        alpha=certificate.alpha,
        event=EVENTS[certificate.loss],
    )


def summary(figures: Calibration, certificate: Certificate) -> str:
    """States the result in one sentence."""
    allowed, requests = figures.errors_allowed, certificate.requests
    levels = f"alpha {100 * certificate.alpha:g} %, delta {100 * certificate.delta:g} %"
    event = f"of {requests} first drafts {EVENTS[certificate.loss]}"
    if certificate.threshold is not None:
        return (
            f"Threshold {certificate.threshold:g} is certified ({levels}): {certificate.errors} "
            f"{event}, {allowed} are allowed."
        )
    strictest = figures.selections[certificate.fingerprint.selection][0]
    too_few = f"{requests} requests are too few to certify anything"
    return (
        f"No threshold qualifies ({levels}): even at {strictest.threshold:g}, the strictest one, "
        f"{strictest.error_rate.count} {event}, and "
        f"{too_few if allowed < 0 else f'{allowed} are allowed'}. More requests, a larger alpha, "
        "another question, or a target with better verdicts may help."
    )


_COSTS = ("error rate", "false accepts", "false rejects", "wrong answers", "accepted", "speedup")


def _costs(row: AtThreshold) -> tuple[str, ...]:
    rates = (row.error_rate, row.false_accepts, row.false_rejects, row.wrong_answers)
    speedup = "" if row.speedup is None else f"{row.speedup:.2f}x"
    return (*map(_percent, rates), f"{row.accept_ratio:.1%}", speedup)


def _percent(found: Proportion) -> str:
    interval = f"{100 * found.low:.2f} to {100 * found.high:.2f}"
    return f"{found.ratio:.2%}\n{interval}\n{found.count}/{found.total}" if found.total else ""


def thresholds_table(rows: Sequence[AtThreshold]) -> Table:
    """Every threshold of one selection."""
    cells = [(f"{row.threshold:.6g}", *_costs(row), "yes" if row.certified else "") for row in rows]
    return ("threshold", *_COSTS, "certified"), cells


def selections_table(figures: Calibration) -> Table:
    """Every selection at the default threshold and at its certified one."""
    cells = []
    for selection, rows in figures.selections.items():
        certified = loosest_certified(rows)
        for row in rows:
            if row is certified or row.threshold == DEFAULT_THRESHOLD:
                name = f"{selection}, certified" if row is certified else selection
                cells.append((name, f"{row.threshold:.6g}", *_costs(row)))
    return ("", "threshold", *_COSTS), cells


def served_table(figures: Calibration) -> Table:
    """Whole answers compared with the plain target's; the difference in points."""
    headings = ("threshold", "accuracy", "plain target's", "regressions", "bound", "difference")
    cells = []
    for row in figures.served:
        interval = (row.difference, row.difference_low, row.difference_high)
        middle, low, high = (f"{100 * value:+.2f}" for value in interval)
        rates = map(_percent, (row.accuracy, row.plain_accuracy, row.regressions))
        bounds = (f"{row.regression_bound:.2%}", f"{middle}\n{low} to {high}")
        gain = (f"{row.speedup:.2f}x", f"{row.draft_ratio:.0%}")
        cells.append((f"{row.threshold:.6g}", *rates, *bounds, *gain))
    return (*headings, "speedup", "from the draft"), cells


def show(console: Console, figures: Calibration, certificate: Certificate) -> None:
    """Prints one row per selection and per served threshold, and the summary."""
    titled = {"first drafts": selections_table(figures), "whole answers": served_table(figures)}
    for title, (headings, rows) in titled.items():
        table = make_table(title, headings)
        for row in rows:
            table.add_row(*row)
        if rows:
            console.print(table)
    console.print(summary(figures, certificate), highlight=False)
