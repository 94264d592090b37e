"""The comparison's page and its plots."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import plotly.graph_objects as go

from sglang_parse.client import page
from sglang_parse.client.figures import STAGES
from sglang_parse.client.page import PALETTE, error_bars
from sglang_parse.client.records import (
    DRAFT,
    EAGLE3,
    PARSE,
    PARSE_EAGLE3,
    PARSE_ONE,
    PERCENTILES,
    PLAIN,
    STANDALONE,
    TITLES,
)
from sglang_parse.compare.figures import Comparison, Spread, VariantFigures

COLOURS = {
    PLAIN: PALETTE["grey"],
    STANDALONE: PALETTE["orange"],
    EAGLE3: PALETTE["green"],
    PARSE_ONE: PALETTE["sky"],
    PARSE: PALETTE["blue"],
    PARSE_EAGLE3: PALETTE["purple"],
    DRAFT: PALETTE["yellow"],
}
STAGE_COLOURS = {
    "prefill": PALETTE["light grey"],
    "draft": PALETTE["sky"],
    "verify": PALETTE["red"],
    "decode": PALETTE["grey"],
}
LATENCY_TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between tokens",
    "e2e": "whole request",
}


def render(figures: Comparison, facts: dict[str, Any]) -> str:
    """report.html: one file that needs nothing else."""
    plots = {"trade": trade_plot(figures), "speed": speed_plot(figures)}
    plots |= {"latency": latency_plot(figures), "time": time_plot(figures)}
    return page.render(
        "sglang_parse.compare",
        "report.html.j2",
        plots,
        figures=figures,
        facts=facts,
        main=main_ways(figures, facts["own_threshold"]),
        titles=TITLES,
        kinds=LATENCY_TITLES,
        percentiles=PERCENTILES,
        stages=STAGES,
    )


def main_ways(figures: Comparison, own_threshold: float) -> list[VariantFigures]:
    """One way per server: PARSE at its own threshold."""
    return [way for way in figures.ways if way.threshold in (None, own_threshold)]


def trade_plot(figures: Comparison) -> go.Figure:
    """Output tokens per second at one request against the score, a line per server."""
    plot = go.Figure()
    for server, ways in _by_server(figures.ways):
        points = [point for way in ways if (point := _trade_point(way))]
        if not points:
            continue
        plot.add_scatter(
            name=TITLES[server],
            x=[rate.median for _, rate, _ in points],
            y=[score for _, _, (_, score, _) in points],
            error_x=error_bars([(rate.low, rate.median, rate.high) for _, rate, _ in points]),
            error_y=error_bars([interval for _, _, interval in points]),
            mode="lines+markers" if len(points) > 1 else "markers",
            line={"color": COLOURS[server], "dash": "dot", "width": 1.5},
            marker={"color": COLOURS[server], "size": 10},
            text=[name for name, _, _ in points],
            hovertemplate="%{text}<br>%{x:.0f} tokens/s, score %{y:.1f} %<extra></extra>",
        )
    plot.update_xaxes(title="output tokens/s, 1 request", rangemode="tozero")
    plot.update_yaxes(title="score, %")
    return plot


def _trade_point(way: VariantFigures) -> tuple[str, Spread, tuple[float, float, float]] | None:
    """(Label, tokens per second, score in percent with its interval); None without both."""
    speed, quality = way.speed_at(1), way.quality
    if speed is None or quality is None or quality.score is None:
        return None
    low, high = quality.interval or (quality.score, quality.score)
    return way.variant.label, speed.tokens_per_s, (100 * low, 100 * quality.score, 100 * high)


def speed_plot(figures: Comparison) -> go.Figure:
    """Speedup over the plain target by concurrency, with ranges."""
    plot = go.Figure()
    for way in figures.ways:
        speeds = [speed for speed in way.speeds if PLAIN in speed.over]
        if way.server == PLAIN or len(speeds) < len(_concurrencies(figures)):
            continue
        over = [speed.over[PLAIN] for speed in speeds]
        plot.add_bar(
            name=TITLES[way.server],
            x=[f"{speed.concurrency} at a time" for speed in speeds],
            y=[spread.median for spread in over],
            error_y=error_bars([(s.low, s.median, s.high) for s in over]),
            marker_color=COLOURS[way.server],
            hovertemplate="%{fullData.name}, %{x}: %{y:.2f}x<extra></extra>",
        )
    plot.add_hline(y=1, line={"color": COLOURS[PLAIN], "dash": "dash", "width": 1})
    plot.update_yaxes(title="speedup over plain", rangemode="tozero")
    plot.update_layout(barmode="group")
    return plot


def latency_plot(figures: Comparison) -> go.Figure:
    """Whole-request latency percentiles at the highest concurrency."""
    plot = go.Figure()
    most = max(_concurrencies(figures), default=1)
    for way in figures.ways:
        speed = way.speed_at(most)
        if speed is None:
            continue
        plot.add_bar(
            name=TITLES[way.server],
            x=list(PERCENTILES),
            y=[speed.latency_ms["e2e"][percentile] for percentile in PERCENTILES],
            marker_color=COLOURS[way.server],
            hovertemplate="%{fullData.name}, %{x}: %{y:.0f} ms<extra></extra>",
        )
    plot.update_yaxes(title=f"whole request, ms, {most} at a time")
    plot.update_layout(barmode="group")
    return plot


def time_plot(figures: Comparison) -> go.Figure:
    """Stacked stage times per request, one at a time, a bar per way with PARSE."""
    ways = [way for way in figures.ways if way.time is not None][::-1]
    plot = go.Figure(layout={"height": 150 + 34 * len(ways)})
    for stage in STAGES:
        plot.add_bar(
            name=stage,
            orientation="h",
            y=[way.variant.label for way in ways],
            x=[way.time.ms_per_request[stage] for way in ways if way.time],
            marker_color=STAGE_COLOURS[stage],
            hovertemplate="%{y}, %{fullData.name}: %{x:.0f} ms<extra></extra>",
        )
    plot.update_xaxes(title="ms per request, 1 request")
    plot.update_yaxes(automargin=True)
    plot.update_layout(barmode="stack")
    return plot


def _by_server(ways: Iterable[VariantFigures]) -> list[tuple[str, list[VariantFigures]]]:
    found: dict[str, list[VariantFigures]] = {}
    for way in ways:
        found.setdefault(way.server, []).append(way)
    return list(found.items())


def _concurrencies(figures: Comparison) -> list[int]:
    return sorted({speed.concurrency for way in figures.ways for speed in way.speeds})
