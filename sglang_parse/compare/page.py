"""The comparison's page and its plots."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import plotly.graph_objects as go

from sglang_parse.client import page
from sglang_parse.client.page import PALETTE, error_bars
from sglang_parse.client.records import PERCENTILES, STAGES, TITLES, kind_of, title_of
from sglang_parse.compare.figures import Comparison, Spread, VariantFigures

_NAMES = (
    *("grey", "orange", "green", "sky", "teal", "blue", "red", "brown", "light grey"),
    *("purple", "yellow"),
)
COLOURS = {kind: PALETTE[name] for kind, name in zip(TITLES, _NAMES, strict=True)}
LATENCY_TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "max_itl": "longest of a request",
    "e2e": "whole request",
}


def render(figures: Comparison, facts: dict[str, Any]) -> str:
    """report.html: one file that needs nothing else."""
    plots = {"speed": speed_plot(figures, facts["baseline"]), "trade": trade_plot(figures)}
    return page.render(
        "sglang_parse.compare",
        "report.html.j2",
        {name: plot for name, plot in plots.items() if plot.data},
        figures=figures,
        facts=facts,
        kinds=LATENCY_TITLES,
        percentiles=PERCENTILES,
        stages=STAGES,
        has_stages=any(speed.stages for one in figures.variants for speed in one.speeds),
        title_of=title_of,
    )


def trade_plot(figures: Comparison) -> go.Figure:
    """Output tokens per second at one request against the score, a line per server."""
    plot = go.Figure()
    for server, variants in groupby(figures.variants, key=lambda one: one.server):
        points = sorted(
            (point for one in variants if (point := _trade_point(one))),
            key=lambda point: point[1].median,
        )
        if not points:
            continue
        plot.add_scatter(
            name=title_of(server),
            x=[rate.median for _, rate, _ in points],
            y=[score for _, _, (_, score, _) in points],
            error_x=error_bars([(rate.low, rate.median, rate.high) for _, rate, _ in points]),
            error_y=error_bars([interval for _, _, interval in points]),
            mode="lines+markers" if len(points) > 1 else "markers",
            line={"color": COLOURS[kind_of(server)], "dash": "dot", "width": 1.5},
            marker={"color": COLOURS[kind_of(server)], "size": 10},
            text=[name for name, _, _ in points],
            hovertemplate="%{text}<br>%{x:.0f} tokens/s, score %{y:.1f} %<extra></extra>",
        )
    plot.update_xaxes(title="output tokens/s, 1 request", rangemode="tozero")
    plot.update_yaxes(title="score, %")
    return plot


def _trade_point(one: VariantFigures) -> tuple[str, Spread, tuple[float, float, float]] | None:
    """(Label, tokens per second, score in percent with its interval); None without both."""
    speed, quality = one.speed_at(1), one.quality
    if speed is None or quality is None or quality.score is None:
        return None
    low, high = quality.interval or (quality.score, quality.score)
    return one.variant.label, speed.tokens_per_s, (100 * low, 100 * quality.score, 100 * high)


def speed_plot(figures: Comparison, baseline: str) -> go.Figure:
    """Speedup over the baseline by concurrency, with ranges."""
    plot = go.Figure()
    for one in figures.variants:
        over = {s.concurrency: s.over[baseline] for s in one.speeds if baseline in s.over}
        if one.threshold is not None or not over:
            continue
        plot.add_bar(
            name=one.variant.label,
            x=[f"{concurrency} at a time" for concurrency in over],
            y=[s.median for s in over.values()],
            error_y=error_bars([(s.low, s.median, s.high) for s in over.values()]),
            marker_color=COLOURS[kind_of(one.server)],
            opacity=1 - 0.5 * one.off_fraction,
            hovertemplate="%{fullData.name}, %{x}: %{y:.2f}x<extra></extra>",
        )
    plot.add_hline(y=1, line={"color": PALETTE["grey"], "dash": "dash", "width": 1})
    plot.update_yaxes(title=f"speedup over {title_of(baseline)}", rangemode="tozero")
    return plot
