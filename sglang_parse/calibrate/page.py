"""The calibration's page and its plots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from scipy import special

from sglang_parse.calibrate import report
from sglang_parse.calibrate.certify import EDGE, Proportion
from sglang_parse.calibrate.figures import Calibration
from sglang_parse.client import page
from sglang_parse.client.page import PALETTE, error_bars
from sglang_parse.core.certificate import Certificate

COLOURS = ("blue", "orange", "green")
TICKS = (1e-5, 1e-4, 0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999)


def render(figures: Calibration, certificate: Certificate, conditions: dict[str, Any]) -> str:
    """Returns report.html: one file without references to others."""
    plots = {"risk": risk_plot(figures, certificate.alpha)}
    if figures.bins:
        plots["reliability"] = reliability_plot(figures)
    values = {"figures": figures, "certificate": certificate, "conditions": conditions}
    return page.render("sglang_parse.calibrate", "report.html.j2", plots, report=report, **values)


def _logit(value: float) -> float:
    return float(special.logit(min(max(value, EDGE), 1 - EDGE)))


def _make_plot(values: Sequence[float], x_title: str, y_title: str) -> go.Figure:
    """An empty plot with a logit axis for these values."""
    low, high = _logit(min(values)), _logit(max(values))
    ticks = [tick for tick in TICKS if low - 0.5 <= _logit(tick) <= high + 0.5]
    plot, places = go.Figure(), [_logit(tick) for tick in ticks]
    plot.update_xaxes(title=x_title, tickvals=places, ticktext=[f"{tick:g}" for tick in ticks])
    plot.update_yaxes(title=y_title, rangemode="tozero")
    return plot


def _add(
    plot: go.Figure,
    name: str,
    colour: str,
    points: Sequence[tuple[float, Proportion]],
    **words: Any,
) -> None:
    """Adds proportions over a verdict or a threshold, in percent, with their intervals."""
    bars = [(100 * one.low, 100 * one.ratio, 100 * one.high) for _, one in points]
    plot.add_scatter(
        name=name,
        x=[_logit(value) for value, _ in points],
        y=[middle for _, middle, _ in bars],
        error_y=error_bars(bars),
        marker={"color": PALETTE[colour], "size": 9, "symbol": words.pop("symbol", "circle")},
        hovertemplate="%{text}<br>%{y:.2f} %<extra>%{fullData.name}</extra>",
        **words,
    )


def risk_plot(figures: Calibration, alpha: float) -> go.Figure:
    """Error rate over threshold, a line per selection."""
    thresholds = [row.threshold for rows in figures.selections.values() for row in rows]
    title = "first drafts with an accepted error, %"
    plot = _make_plot(thresholds, "threshold, logit scale", title)
    for colour, (selection, rows) in zip(COLOURS, figures.selections.items(), strict=True):
        _add(
            *(plot, selection, colour, [(row.threshold, row.error_rate) for row in rows]),
            mode="lines+markers",
            symbol=["circle" if row.certified else "circle-open" for row in rows],
            text=[f"threshold {row.threshold:g}, accepted {row.accept_ratio:.1%}" for row in rows],
        )
    plot.add_hline(y=100 * alpha, line={"color": PALETTE["grey"], "dash": "dash"})
    return plot


def reliability_plot(figures: Calibration) -> go.Figure:
    """Fraction of right prefixes over verdict, with the line of perfect calibration."""
    low, high = figures.bins[0].low, figures.bins[-1].high
    plot = _make_plot([low, high], "verdict, logit scale", "prefixes without an error, %")
    xs, grey = np.linspace(_logit(low), _logit(high), 61), {"color": PALETTE["light grey"]}
    plot.add_scatter(
        name="verdict = fraction right",
        x=xs.tolist(),
        y=(100 * special.expit(xs)).tolist(),
        **{"mode": "lines", "marker": grey, "line": {**grey, "dash": "dash"}},
    )
    points = [(one.mean, one.right) for one in figures.bins]
    texts = [f"verdicts {one.low:.6g} to {one.high:.6g}" for one in figures.bins]
    _add(plot, "verified prefixes", "blue", points, mode="markers", text=texts)
    return plot
