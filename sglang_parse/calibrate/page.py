"""The calibration's page and its plots."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
from scipy import special

from sglang_parse.calibrate.certify import EDGE
from sglang_parse.calibrate.figures import Calibration
from sglang_parse.calibrate.report import WHAT, promise
from sglang_parse.calibrate.show import difference, verdict
from sglang_parse.client import page
from sglang_parse.client.page import PALETTE, error_bars
from sglang_parse.core.certificate import Certificate

COLOURS = {
    "first-reject": PALETTE["blue"],
    "longest": PALETTE["orange"],
    "answer-first": PALETTE["green"],
}
TICKS = (1e-5, 1e-4, 0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999)


def render(figures: Calibration, certificate: Certificate, facts: dict[str, Any]) -> str:
    """report.html: one file that needs nothing else."""
    plots = {"risk": risk_plot(figures), "trade": trade_plot(figures)}
    if figures.bins:
        plots["reliability"] = reliability_plot(figures)
    return page.render(
        "sglang_parse.calibrate",
        "report.html.j2",
        plots,
        figures=figures,
        certificate=certificate,
        facts=facts,
        verdict=verdict(figures),
        promise=promise(figures),
        what=WHAT[figures.loss],
        difference=difference,
    )


def _logit(value: float) -> float:
    return float(special.logit(min(max(value, EDGE), 1 - EDGE)))


def _logit_axis(plot: go.Figure, values: list[float], title: str) -> None:
    """Verdicts are read where they live, near 0 and 1."""
    low, high = min(map(_logit, values)), max(map(_logit, values))
    ticks = [tick for tick in TICKS if low - 0.5 <= _logit(tick) <= high + 0.5]
    plot.update_xaxes(
        title=title, tickvals=[_logit(tick) for tick in ticks], ticktext=[f"{t:g}" for t in ticks]
    )


def risk_plot(figures: Calibration) -> go.Figure:
    """Loss against threshold, a line per rule, with exact intervals."""
    plot = go.Figure()
    for rule in figures.rules:
        rows = rule.thresholds
        plot.add_scatter(
            name=rule.rule,
            x=[_logit(row.threshold) for row in rows],
            y=[100 * row.loss.share for row in rows],
            error_y=error_bars(
                [(100 * r.loss.low, 100 * r.loss.share, 100 * r.loss.high) for r in rows]
            ),
            mode="lines+markers",
            line={"color": COLOURS[rule.rule], "width": 1.5},
            marker={
                "color": COLOURS[rule.rule],
                "size": 9,
                "symbol": ["circle" if row.certified else "circle-open" for row in rows],
            },
            text=[f"threshold {row.threshold:g}" for row in rows],
            hovertemplate="%{text}<br>loss %{y:.2f} %<extra>%{fullData.name}</extra>",
        )
    plot.add_hline(y=100 * figures.alpha, line={"color": PALETTE["grey"], "dash": "dash"})
    _logit_axis(plot, [row.threshold for row in figures.own.thresholds], "threshold, logit scale")
    plot.update_yaxes(title="first drafts that lose, %", rangemode="tozero")
    return plot


def trade_plot(figures: Calibration) -> go.Figure:
    """Share of the drafts kept against loss."""
    plot = go.Figure()
    for rule in figures.rules:
        rows = rule.thresholds
        plot.add_scatter(
            name=rule.rule,
            x=[100 * row.loss.share for row in rows],
            y=[100 * row.kept for row in rows],
            mode="lines+markers",
            line={"color": COLOURS[rule.rule], "width": 1.5},
            marker={"color": COLOURS[rule.rule], "size": 7},
            text=[f"threshold {row.threshold:g}" for row in rows],
            hovertemplate="%{text}<br>loss %{x:.2f} %, kept %{y:.1f} %"
            "<extra>%{fullData.name}</extra>",
        )
    plot.update_xaxes(title="first drafts that lose, %", rangemode="tozero")
    plot.update_yaxes(title="kept of the drafted tokens, %", rangemode="tozero")
    return plot


def reliability_plot(figures: Calibration) -> go.Figure:
    """How often a prefix is right, by its verdict; the line is where the two are the same."""
    plot, bins = go.Figure(), figures.bins
    low, high = bins[0].low, bins[-1].high
    xs = [_logit(low) + k * (_logit(high) - _logit(low)) / 60 for k in range(61)]
    plot.add_scatter(
        name="verdict = share right",
        x=xs,
        y=[100 * float(special.expit(x)) for x in xs],
        mode="lines",
        line={"color": PALETTE["light grey"], "dash": "dash"},
        marker={"color": PALETTE["light grey"]},
        hoverinfo="skip",
    )
    plot.add_scatter(
        name="judged prefixes",
        x=[_logit(one.mean) for one in bins],
        y=[100 * one.right.share for one in bins],
        error_y=error_bars(
            [(100 * b.right.low, 100 * b.right.share, 100 * b.right.high) for b in bins]
        ),
        mode="markers",
        marker={"color": PALETTE["blue"], "size": 9},
        text=[f"verdicts {one.low:.6g} to {one.high:.6g}" for one in bins],
        hovertemplate="%{text}<br>right %{y:.1f} %<extra></extra>",
    )
    _logit_axis(plot, [low, high], "verdict, logit scale")
    plot.update_yaxes(title="prefixes without an error, %", range=[-4, 104])
    return plot
