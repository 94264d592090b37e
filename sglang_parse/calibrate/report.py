"""A calibration described once: calibration.json, the terminal, and report.html with its plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import plotly.graph_objects as go
from scipy import special

from sglang_parse.calibrate.figures import EDGE, AtThreshold, Calibration, loosest_certified
from sglang_parse.client.page import PALETTE, error_bars
from sglang_parse.client.sections import (
    Cell,
    Columns,
    Facts,
    Grid,
    Plot,
    Sections,
    Text,
    filled,
    with_interval,
)
from sglang_parse.client.statistics import CHANCE, Proportion
from sglang_parse.core.certificate import Certificate

GUARANTEE = (
    "With confidence {confidence:g} over the draw of the calibration set: at most a fraction "
    "{alpha:g} of the first drafts of requests exchangeable with these {event}, at this threshold "
    "and at every stricter one. Not covered: later rounds of an answer (the check by whole answers "
    "bounds those), other data, other models, other judges."
)
TICKS = (1e-5, 1e-4, 0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999)
EVENTS = {
    "token": "have their first wrong token accepted",
    "answer": "are accepted whole with a wrong answer",
}


def content(
    figures: Calibration, certificate: Certificate, conditions: dict[str, Any]
) -> dict[str, Any]:
    """``calibration.json`` as plain data; not rounded, verdicts differ in the fourth place."""
    words = {"guarantee": guarantee(certificate), "conditions": conditions}
    return {**certificate.model_dump(), **words, "results": asdict(figures)}


def guarantee(certificate: Certificate) -> str:
    if certificate.threshold is None:
        return "No threshold qualifies: there is no guarantee."
    confidence, event = 1 - certificate.delta, EVENTS[certificate.loss]
    return GUARANTEE.format(confidence=confidence, alpha=certificate.alpha, event=event)


def sections(
    figures: Calibration, certificate: Certificate, conditions: dict[str, Any]
) -> Sections:
    """Everything that a reader is told, by heading; on a terminal at most 80 characters wide."""
    risk = "Filled: certified. Dashed: alpha. Bars: exact 95 % intervals."
    facts = certificate.model_dump(exclude={"fingerprint", "first_verdicts"})
    found: Sections = {
        "": [*summary(figures, certificate), Text(guarantee(certificate))],
        "Error rate by threshold": [Plot("risk", risk_plot(figures, certificate.alpha), risk)],
        "Cost of a threshold": [threshold_grid(figures, figures.thresholds, ())],
        "Certified and served": [threshold_grid(figures, chosen(figures), (0, 1, 2, 3, 5))],
        "Whole answers": [served_grid(figures)],
        "Conditions": [Facts(facts | conditions | certificate.fingerprint.model_dump())],
    }
    return filled(found)


# -- sentences ----------------------------------------------------------------------------


def summary(figures: Calibration, certificate: Certificate) -> list[str]:
    """States the result, bad news first."""
    results = [_certified(figures, certificate), _served(figures, certificate)]
    separation = _separation(figures)
    return [separation, *results] if figures.separation.is_at_chance else [*results, separation]


def _certified(figures: Calibration, certificate: Certificate) -> str:
    rows = figures.thresholds
    levels = f"alpha {100 * certificate.alpha:g} %, delta {100 * certificate.delta:g} %"
    if row := loosest_certified(rows):
        return f"Threshold {row.threshold:g} is certified ({levels}): {_fares(row, certificate)}."
    few = f"{certificate.requests} requests are too few to certify anything"
    allowed = f"{figures.errors_allowed} are allowed" if figures.errors_allowed >= 0 else few
    return (
        f"No threshold qualifies ({levels}): even at {rows[0].threshold:g}, the strictest one, "
        f"{_fares(rows[0], certificate)}; {allowed}. More requests, a larger alpha, another "
        "judge (--judge), or a target with better verdicts may help."
    )


def _served(figures: Calibration, certificate: Certificate) -> str:
    (row,) = (row for row in figures.thresholds if row.threshold == figures.served_threshold)
    verdict = "is certified, too" if row.certified else "is NOT certified"
    return f"The server's threshold {row.threshold:g} {verdict}: {_fares(row, certificate)}."


def _fares(row: AtThreshold, certificate: Certificate) -> str:
    risk = row.error_rate
    return (
        f"{risk.count} of {risk.total} first drafts {EVENTS[certificate.loss]} "
        f"({100 * risk.ratio:.1f} %, 95 % interval {100 * risk.low:.1f} to {100 * risk.high:.1f}), "
        f"and {100 * row.accept_ratio:.1f} % of the drafted tokens are accepted"
    )


def _separation(figures: Calibration) -> str:
    found = figures.separation
    counts = f"{found.right} right and {found.wrong} wrong first drafts"
    if found.auroc is None:
        return f"Whether verdicts tell right from wrong is unknown: there were {counts}."
    interval = f"95 % interval {found.low:.2f} to {found.high:.2f}, 0.5 is a coin toss"
    area = f"AUROC {found.auroc:.2f}, {interval}; {counts}"
    if found.low > CHANCE:
        return f"Right drafts get higher verdicts than wrong ones ({area})."
    if not found.is_at_chance:
        return f"Whether right drafts get higher verdicts is open ({area}): give more --requests."
    verdicts = "LOWER verdicts than" if found.high < CHANCE else "the SAME verdicts as"
    return (
        f"Right drafts get {verdicts} wrong ones ({area}). The judge does not work for this "
        "model, and no threshold can mend that: do not serve it. Fix: --parse-judge likelihood, "
        "which accepts what the target would have written; a head of sglang-parse train-judge; "
        "another --parse-question; or --parse-verification token."
    )


# -- tables and plots ---------------------------------------------------------------------


def chosen(figures: Calibration) -> list[AtThreshold]:
    """The thresholds that matter: the served ones and the certified one."""
    wanted, best = {one.threshold for one in figures.served}, loosest_certified(figures.thresholds)
    wanted |= {figures.served_threshold, best.threshold if best else figures.served_threshold}
    return [row for row in figures.thresholds if row.threshold in wanted]


def threshold_grid(figures: Calibration, rows: Sequence[AtThreshold], shown: Sequence[int]) -> Grid:
    def threshold(row: AtThreshold) -> Cell:
        is_served = row.threshold == figures.served_threshold
        return f"{row.threshold:.6g}", "the server's" if is_served else ""

    columns: Columns = {
        "threshold": threshold,
        "certified": lambda row: "yes" if row.certified else "no",
        "accepted": lambda row: f"{row.accept_ratio:.1%}",
        "error rate": lambda row: _rate(row.error_rate, "drafts"),
        "false accepts": lambda row: _rate(row.false_accepts, "wrong"),
        "false rejects": lambda row: _rate(row.false_rejects, "right"),
        "wrong answers": lambda row: _rate(row.wrong_answers, "drafts"),
    }
    note = (
        "Accepted: of the drafted tokens. False accepts: drafts with an accepted error, of those "
        "with an error. False rejects: drafts without one that are not accepted whole. Wrong "
        "answers: drafts accepted whole with a wrong answer."
    )
    return Grid.of([(row,) for row in rows], columns, note, shown)


def served_grid(figures: Calibration) -> Grid:
    columns: Columns = {
        "threshold": lambda one: f"{one.threshold:.6g}",
        "accuracy": lambda one: _rate(one.accuracy),
        "plain target's": lambda one: _rate(one.plain_accuracy),
        "regressions": lambda one: _rate(one.regressions),
        "bound": lambda one: f"{one.regression_bound:.2%}",
        "difference": lambda one: _percent(one.difference, one.difference_low, one.difference_high),
    }
    note = (
        "Regressions: wrong, of the answers that the plain target gets right. Bound: of all "
        "requests, with confidence 1 - delta. Difference: paired, 95 % interval."
    )
    return Grid.of([(one,) for one in figures.served], columns, note, (0, 1, 2, 4))


def _rate(found: Proportion, of: str = "") -> Cell:
    ratio, interval = _percent(found.ratio, found.low, found.high)
    return ratio, f"{interval}\n{found.count} of {found.total} {of}".rstrip()


def _percent(value: float, low: float, high: float) -> tuple[str, str]:
    return with_interval(100 * value, 100 * low, 100 * high, unit=" %")


def _logit(value: float) -> float:
    return float(special.logit(min(max(value, EDGE), 1 - EDGE)))


def risk_plot(figures: Calibration, alpha: float) -> go.Figure:
    """Error rates with their intervals, over the thresholds on a logit axis."""
    rows, plot = figures.thresholds, go.Figure()
    places = [_logit(row.threshold) for row in rows]
    rates = [row.error_rate for row in rows]
    bars = [(100 * one.low, 100 * one.ratio, 100 * one.high) for one in rates]
    marks = ["circle" if row.certified else "circle-open" for row in rows]
    plot.add_scatter(
        name="error rate",
        x=places,
        y=[middle for _, middle, _ in bars],
        error_y=error_bars(bars),
        mode="lines+markers",
        marker={"color": PALETTE["blue"], "size": 9, "symbol": marks},
        text=[f"threshold {row.threshold:g}, accepted {row.accept_ratio:.1%}" for row in rows],
        hovertemplate="%{text}<br>%{y:.2f} %<extra>%{fullData.name}</extra>",
    )
    plot.add_hline(y=100 * alpha, line={"color": PALETTE["grey"], "dash": "dash"})
    low, high = min(places) - 0.5, max(places) + 0.5
    ticks = {_logit(tick): f"{tick:g}" for tick in TICKS if low <= _logit(tick) <= high}
    labels = {"tickvals": [*ticks], "ticktext": [*ticks.values()]}
    plot.update_xaxes(title="threshold, logit scale", **labels)
    plot.update_yaxes(title="first drafts with an accepted error, %", rangemode="tozero")
    return plot
