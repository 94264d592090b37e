"""The comparison as one HTML file that needs nothing else: Jinja2's page, Plotly's plots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from sglang_parse.bench.compare.figures import Figures, Spread, WayFigures
from sglang_parse.bench.compare.lineup import (
    DRAFT,
    EAGLE3,
    PARSE,
    PARSE_EAGLE3,
    PLAIN,
    STANDALONE,
    TITLES,
    label,
)
from sglang_parse.bench.compare.records import PERCENTILES
from sglang_parse.bench.demo.figures import STAGES

# Okabe and Ito's palette: told apart by colour-blind readers too.
COLOURS = {
    PLAIN: "#5f6368",
    STANDALONE: "#e69f00",
    EAGLE3: "#009e73",
    PARSE: "#0072b2",
    PARSE_EAGLE3: "#cc79a7",
    DRAFT: "#b8a000",
}
STAGE_COLOURS = dict(zip(STAGES, ("#9aa0a6", "#56b4e9", "#d55e00", "#5f6368"), strict=True))
LATENCY_TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between tokens",
    "e2e": "whole request",
}
CONFIG = {"responsive": True, "displaylogo": False, "displayModeBar": False}


def write_page(path: Path, figures: Figures, facts: dict[str, Any]) -> None:
    """Write report.html: scripts, styles and data inside."""
    path.write_text(render(figures, facts), encoding="utf-8")


def render(figures: Figures, facts: dict[str, Any]) -> str:
    """The page's text."""
    environment = Environment(
        loader=PackageLoader("sglang_parse.bench.compare", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "label": label,
        "titles": TITLES,
        "kinds": LATENCY_TITLES,
        "percentiles": PERCENTILES,
        "stages": STAGES,
    }
    plots = {name: _div(name, plot) for name, plot in _plots(figures).items()}
    return environment.get_template("report.html.j2").render(
        figures=figures,
        facts=facts,
        main=main_ways(figures, facts["own_threshold"]),
        plots=plots,
        plotly=Markup(get_plotlyjs()),  # noqa: S704 - the library's own script
    )


def main_ways(figures: Figures, own_threshold: float) -> list[WayFigures]:
    """One way per server: PARSE at its own threshold."""
    return [way for way in figures.ways if way.threshold in (None, own_threshold)]


def _plots(figures: Figures) -> dict[str, go.Figure]:
    plots = {"trade": trade_plot(figures), "speed": speed_plot(figures)}
    plots |= {"latency": latency_plot(figures), "time": time_plot(figures)}
    return plots


def _div(name: str, plot: go.Figure) -> Markup:
    plot.update_layout(
        template="plotly_white",
        margin={"l": 56, "r": 12, "t": 12, "b": 48},
        font={"family": "system-ui, sans-serif", "size": 13},
        showlegend=False,  # in HTML below: Plotly's own covers the plot where it is narrow
        hoverlabel={"namelength": -1},
    )
    html = plot.to_html(
        full_html=False,
        include_plotlyjs=False,
        config=CONFIG,
        div_id=f"plot-{name}",
        default_height=plot.layout.height or 420,
    )
    return _legend(plot) + Markup(html)  # noqa: S704 - made by the library from our numbers


def _legend(plot: go.Figure) -> Markup:
    """Every trace's name beside its colour."""
    entries = [
        Markup('<span><i style="background: {}"></i>{}</span>').format(
            trace.marker.color, trace.name
        )
        for trace in plot.data
    ]
    return Markup('<div class="legend">{}</div>').format(Markup("").join(entries))


def trade_plot(figures: Figures) -> go.Figure:
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
            error_x=_bars([(rate.low, rate.median, rate.high) for _, rate, _ in points]),
            error_y=_bars([interval for _, _, interval in points]),
            mode="lines+markers" if len(points) > 1 else "markers",
            line={"color": COLOURS[server], "dash": "dot", "width": 1.5},
            marker={"color": COLOURS[server], "size": 10},
            text=[name for name, _, _ in points],
            hovertemplate="%{text}<br>%{x:.0f} tokens/s, score %{y:.1f} %<extra></extra>",
        )
    plot.update_xaxes(title="output tokens/s, 1 request", rangemode="tozero")
    plot.update_yaxes(title="score, %")
    return plot


def _trade_point(way: WayFigures) -> tuple[str, Spread, tuple[float, float, float]] | None:
    """(Label, tokens per second, score in percent with its interval); None without both."""
    speed, quality = way.speed_at(1), way.quality
    if speed is None or quality is None or quality.score is None:
        return None
    low, high = quality.interval or (quality.score, quality.score)
    return label(way.way), speed.tokens_per_s, (100 * low, 100 * quality.score, 100 * high)


def speed_plot(figures: Figures) -> go.Figure:
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
            error_y=_bars([(s.low, s.median, s.high) for s in over]),
            marker_color=COLOURS[way.server],
            hovertemplate="%{fullData.name}, %{x}: %{y:.2f}x<extra></extra>",
        )
    plot.add_hline(y=1, line={"color": COLOURS[PLAIN], "dash": "dash", "width": 1})
    plot.update_yaxes(title="speedup over plain", rangemode="tozero")
    plot.update_layout(barmode="group")
    return plot


def latency_plot(figures: Figures) -> go.Figure:
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


def time_plot(figures: Figures) -> go.Figure:
    """Stacked stage times per request, one at a time, a bar per way with PARSE."""
    ways = [way for way in figures.ways if way.time is not None][::-1]
    plot = go.Figure(layout={"height": 150 + 34 * len(ways)})
    for stage in STAGES:
        plot.add_bar(
            name=stage,
            orientation="h",
            y=[label(way.way) for way in ways],
            x=[way.time.ms_per_request[stage] for way in ways if way.time],
            marker_color=STAGE_COLOURS[stage],
            hovertemplate="%{y}, %{fullData.name}: %{x:.0f} ms<extra></extra>",
        )
    plot.update_xaxes(title="ms per request, 1 request")
    plot.update_yaxes(automargin=True)
    plot.update_layout(barmode="stack")
    return plot


def _bars(points: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    """Error bars from (low, middle, high)."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [high - middle for _, middle, high in points],
        "arrayminus": [middle - low for low, middle, _ in points],
        "thickness": 1,
        "width": 3,
    }


def _by_server(ways: Iterable[WayFigures]) -> list[tuple[str, list[WayFigures]]]:
    found: dict[str, list[WayFigures]] = {}
    for way in ways:
        found.setdefault(way.server, []).append(way)
    return list(found.items())


def _concurrencies(figures: Figures) -> list[int]:
    return sorted({speed.concurrency for way in figures.ways for speed in way.speeds})
