"""The calibration's page and its plots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from scipy import special

from sglang_parse.calibrate import report
from sglang_parse.calibrate.certify import EDGE, Proportion
from sglang_parse.calibrate.figures import Calibration
from sglang_parse.client import page
from sglang_parse.client.page import PALETTE, error_bars
from sglang_parse.core.certificate import Certificate

COLOURS = {
    "first-reject": PALETTE["blue"],
    "longest": PALETTE["orange"],
    "answer-first": PALETTE["green"],
}
TICKS = (1e-5, 1e-4, 0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999)


def render(figures: Calibration, certificate: Certificate, conditions: dict[str, Any]) -> str:
    """Returns report.html: one file without references to others."""
    plots = {"risk": risk_plot(figures, certificate.alpha)}
    if figures.bins:
        plots["reliability"] = reliability_plot(figures)
    return page.render(
        "sglang_parse.calibrate",
        "report.html.j2",
        plots,
        figures=figures,
        certificate=certificate,
        conditions=conditions,
        report=report,
    )


def _logit(value: float) -> float:
    return float(special.logit(min(max(value, EDGE), 1 - EDGE)))


def _interval(found: Sequence[Proportion]) -> dict[str, Any]:
    return error_bars([(100 * one.low, 100 * one.ratio, 100 * one.high) for one in found])


def _logit_axis(plot: go.Figure, values: list[float], title: str) -> None:
    low, high = min(map(_logit, values)), max(map(_logit, values))
    ticks = [tick for tick in TICKS if low - 0.5 <= _logit(tick) <= high + 0.5]
    plot.update_xaxes(
        title=title, tickvals=[_logit(tick) for tick in ticks], ticktext=[f"{t:g}" for t in ticks]
    )


def risk_plot(figures: Calibration, alpha: float) -> go.Figure:
    """Error rate over threshold, a line per selection, with exact intervals."""
    plot = go.Figure()
    for selection, rows in figures.selections.items():
        colour = COLOURS[selection]
        plot.add_scatter(
            name=selection,
            x=[_logit(row.threshold) for row in rows],
            y=[100 * row.error_rate.ratio for row in rows],
            error_y=_interval([row.error_rate for row in rows]),
            mode="lines+markers",
            line={"color": colour, "width": 1.5},
            marker={
                "color": colour,
                "size": 9,
                "symbol": ["circle" if row.certified else "circle-open" for row in rows],
            },
            text=[
                f"threshold {row.threshold:g}<br>accepted {row.accept_ratio:.1%}" for row in rows
            ],
            hovertemplate="%{text}<br>error rate %{y:.2f} %<extra>%{fullData.name}</extra>",
        )
    plot.add_hline(y=100 * alpha, line={"color": PALETTE["grey"], "dash": "dash"})
    thresholds = [row.threshold for rows in figures.selections.values() for row in rows]
    _logit_axis(plot, thresholds, "threshold, logit scale")
    plot.update_yaxes(title="first drafts with an accepted error, %", rangemode="tozero")
    return plot


def reliability_plot(figures: Calibration) -> go.Figure:
    """Fraction of right prefixes over verdict, with the line of perfect calibration."""
    plot, bins = go.Figure(), figures.bins
    low, high = bins[0].low, bins[-1].high
    xs = [_logit(low) + k * (_logit(high) - _logit(low)) / 60 for k in range(61)]
    plot.add_scatter(
        name="verdict = fraction right",
        x=xs,
        y=[100 * float(special.expit(x)) for x in xs],
        mode="lines",
        line={"color": PALETTE["light grey"], "dash": "dash"},
        marker={"color": PALETTE["light grey"]},
        hoverinfo="skip",
    )
    plot.add_scatter(
        name="verified prefixes",
        x=[_logit(one.mean) for one in bins],
        y=[100 * one.right.ratio for one in bins],
        error_y=_interval([one.right for one in bins]),
        mode="markers",
        marker={"color": PALETTE["blue"], "size": 9},
        text=[f"verdicts {one.low:.6g} to {one.high:.6g}" for one in bins],
        hovertemplate="%{text}<br>right %{y:.1f} %<extra></extra>",
    )
    _logit_axis(plot, [low, high], "verdict, logit scale")
    plot.update_yaxes(title="prefixes without an error, %", range=[-4, 104])
    return plot
