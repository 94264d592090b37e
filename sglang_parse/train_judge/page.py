"""The training's page and its plots."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from sglang_parse.client import page
from sglang_parse.client.page import PALETTE, error_bars
from sglang_parse.core.certificate import Fingerprint
from sglang_parse.train_judge import report as words
from sglang_parse.train_judge.figures import CHANCE, Estimate
from sglang_parse.train_judge.report import JudgeReport

COLOURS = ("blue", "orange", "green", "purple")


def render(report: JudgeReport, fingerprint: Fingerprint, facts: dict[str, Any]) -> str:
    """Returns report.html: one file without references to others."""
    plots = {"risk": risk_plot(report), "curve": curve_plot(report)}
    values = {"report": report, "words": words, "fingerprint": fingerprint, "conditions": facts}
    return page.render("sglang_parse.train_judge", "report.html.j2", plots, **values)


def _bar(one: Estimate, factor: float = 1.0) -> tuple[float, float, float]:
    """Low, value, high."""
    return tuple(factor * (part or 0.0) for part in (one.low, one.value, one.high))  # type: ignore[return-value]


def risk_plot(report: JudgeReport) -> go.Figure:
    """Tokens kept over the accepted risk, a line per reader."""
    plot = go.Figure()
    for colour, (name, found) in zip(COLOURS, words.rows(report), strict=False):
        bars = [_bar(one, 100) for one in found.kept_at_risk.values()]
        plot.add_scatter(
            name=name,
            x=[float(risk) for risk in found.kept_at_risk],
            y=[middle for _, middle, _ in bars],
            error_y=error_bars(bars),
            mode="lines+markers",
            marker={"color": PALETTE[colour], "size": 9},
            hovertemplate="%{y:.1f} % at %{x} %<extra>%{fullData.name}</extra>",
        )
    plot.update_xaxes(title="drafts with an accepted error, %", rangemode="tozero")
    plot.update_yaxes(title="draft tokens kept, %", rangemode="tozero")
    return plot


def curve_plot(report: JudgeReport) -> go.Figure:
    """The head's AUROC over the number of drafts that trained it."""
    bars = [_bar(one) for _, one in report.curve]
    plot = go.Figure()
    plot.add_scatter(
        name=words.HEAD,
        x=[count for count, _ in report.curve],
        y=[middle for _, middle, _ in bars],
        error_y=error_bars(bars),
        mode="lines+markers",
        marker={"color": PALETTE["blue"], "size": 9},
        hovertemplate="%{x} drafts: %{y:.3f}<extra></extra>",
    )
    plot.add_hline(y=CHANCE, line={"color": PALETTE["grey"], "dash": "dash"})
    plot.update_xaxes(title="labeled drafts that trained it", type="log")
    plot.update_yaxes(title="AUROC on other prompts")
    return plot
