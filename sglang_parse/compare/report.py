"""The comparison described once: results.json, sections of report.html with its plots, of which the
terminal shows the tables, and the result in sentences."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import groupby
from typing import Any

import plotly.graph_objects as go

from sglang_parse.client.conditions import of_now
from sglang_parse.client.page import PALETTE, error_bars
from sglang_parse.client.records import (
    DRAFT,
    PARSE,
    PERCENTILES,
    PLAIN,
    STAGES,
    STANDALONE,
    TITLES,
    Variant,
    kind_of,
    title_of,
)
from sglang_parse.client.sections import (
    Cell,
    Columns,
    Facts,
    Grid,
    Part,
    Plot,
    Sections,
    Shown,
    Text,
    filled,
    with_interval,
)
from sglang_parse.client.servers import DEFAULTS, ENVIRONMENT, ServerSpec
from sglang_parse.client.statistics import PairedTest, rounded
from sglang_parse.client.targets import command_of
from sglang_parse.compare.figures import (
    Comparison,
    Measured,
    Quality,
    SpeedAt,
    Spread,
    VariantFigures,
)
from sglang_parse.compare.settings import CompareSettings

COLOURS = dict(zip(TITLES, PALETTE.values(), strict=True))
LATENCIES = {
    "ttft": ("time to first token", 0),
    "tpot": ("time per output token", 1),
    "itl": ("inter-token latency", 1),
    "max_itl": ("longest of a request", 1),
    "e2e": ("whole request", 0),
}
"""Latency -> its name for people, and decimal places of its ms."""
TITLE, NO_PARSE = "PARSE versus stock SGLang", "No server with PARSE took part."
NOTES = {
    STANDALONE: "SGLang's STANDALONE shifts the prompt by one token, as EAGLE needs it: its draft "
    "model never sees the first token and accepts less than it could. PARSE's sees all of it.",
    PARSE: "On a CPU SGLang schedules the plain target and the draft alone with overlap, PARSE "
    "without, because a CPU that works through an iteration has nothing else to do.",
}
"""What a fair reader must know about a server that takes part."""


def results(figures: Comparison, measured: Measured, facts: dict[str, Any]) -> dict[str, Any]:
    """Plain data: what the page shows, and what it was computed from."""
    return {
        "conditions": facts,
        **rounded(asdict(figures)),
        "serving_runs": [rounded(asdict(run)) for run in measured.serving],
        "graded_runs": [
            {
                "server": run.variant.server,
                "threshold": run.variant.threshold,
                "off_fraction": run.variant.off_fraction,
                "repeat": run.run,
                "output_tokens": run.output_tokens,
                "scores": list(run.scores),
            }
            for run in measured.graded
        ],
    }


def conditions(
    settings: CompareSettings,
    specs: Sequence[ServerSpec],
    task: str,
    bench_command: str,
    seconds: float,
) -> dict[str, Any]:
    environment = {**DEFAULTS, **{key: os.environ[key] for key in DEFAULTS if key in os.environ}}
    kinds = dict.fromkeys(map(kind_of, settings.servers))
    return {
        **of_now(),
        "minutes": round(seconds / 60, 1),
        "servers": {title_of(spec.name): command_of(spec) for spec in specs}
        | {title_of(name): remote.url for name, remote in settings.remotes.items()},
        "environment": environment | ENVIRONMENT if specs else {},
        "bench_serving": bench_command,
        "task": task,
        "settings": asdict(settings),
        "requests_per_run": {str(c): settings.num_requests(c) for c in settings.concurrencies},
        "baseline": settings.baseline,
        "stock": list(settings.stock_servers),
        "notes": [NOTES[kind] for kind in kinds if kind in NOTES],
    }


def sections(figures: Comparison, facts: dict[str, Any], shows_latency: bool = True) -> Sections:
    """Everything that a reader is told, by heading; latencies on a terminal only if they fit."""
    baseline = facts["baseline"]
    lead = Text(f"{facts['date']}. {facts['task']}. {facts['minutes']} minutes.", "low")
    others = {name: fact for name, fact in facts.items() if name != "servers"}
    found: Sections = {
        "": [lead, *summary(figures)],
        "Throughput against accuracy": _quality(figures),
        "Speedup": [Plot("speed", speed_plot(figures, baseline)), _speedup(figures, facts)],
        "Latency": [_latency(figures, None if shows_latency else ())],
        "Where the time goes": [*_stage_times(figures)] or [Text(NO_PARSE)],
        "Conditions": [Facts(others | facts["servers"])],
    }
    return filled(found)


def _quality(figures: Comparison) -> list[Part]:
    graded = [(one, one.quality) for one in figures.variants if one.quality]
    points = 'A point per threshold: "PARSE at 0.9" accepts prefixes with verdicts of 0.9 or more.'
    bars = "Bars: smallest to largest run; exact 95 % interval of the score."
    columns: Columns = {
        "": lambda one, _: one.variant.label,
        "score": lambda _, quality: _score(quality),
        "against plain, paired": lambda _, quality: _tested(quality),
        "tokens/s, 1 request": lambda one, _: _range(one.speed_at(1)),
        "accept length": lambda one, _: _known(one.accept_length, "{:.2f}"),
    }
    note = "Accept length: tokens per verify pass, the bonus token included."
    if test := figures.noise:
        note += f" Noise floor, the plain target against itself: {_said(test)}; {test.method}."
    trade = Plot("trade", trade_plot(figures), f"{points} {bars}")
    return [trade, Grid.of(graded, columns, note)]


def _score(quality: Quality) -> Cell:
    if quality.score is None:
        return "not graded"
    count = f"n = {quality.problems}"
    if quality.interval:
        low, high = (100 * bound for bound in quality.interval)
        count = f"{low:.1f} to {high:.1f}, {count}"
    return f"{100 * quality.score:.1f} %", count


def _tested(quality: Quality) -> str:
    if quality.test is None:
        return "" if quality.score is None else "baseline"
    return _said(quality.test)


def _said(test: PairedTest) -> str:
    return f"{test.better} better, {test.worse} worse, p = {test.p_value:.2g}"


def _range(of: SpeedAt | None, other: str = "") -> Cell:
    if of is None or (other and other not in of.over):
        return ""
    spread, digits, unit = of.tokens_per_s, 0, ""
    if other:
        spread, digits, unit = of.over[other], 2, "x"
    return with_interval(spread.median, spread.low, spread.high, digits, unit)


def _known(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _by_load(figures: Comparison, columns: Columns, note: str, shown: Shown = None) -> Grid:
    """A row for each server and concurrency, at the servers' own thresholds."""
    rows = [
        [one.variant.label, f"{speed.concurrency}", *cells]
        for one in figures.variants
        if one.threshold is None
        for speed in one.speeds
        if any(cells := [make(speed) for make in columns.values()])
    ]
    return Grid(["", "at a time", *columns], rows, note, shown)


def _speedup(figures: Comparison, facts: dict[str, Any]) -> Grid:
    over: Columns = {
        f"over {title_of(name)}": partial(_range, other=name) for name in facts["stock"]
    }
    note = "Medians over the runs; smallest to largest."
    return _by_load(figures, {"tokens/s": _range, **over}, note)


def _latency(figures: Comparison, shown: Shown) -> Grid:
    def of(speed: SpeedAt, kind: str, places: int) -> Cell:
        return "/".join(f"{speed.latency_ms[kind][p]:.{places}f}" for p in PERCENTILES)

    known = {kind for one in figures.variants for speed in one.speeds for kind in speed.latency_ms}
    small = f"{'/'.join(PERCENTILES)}, ms"
    columns: Columns = {
        (title, small): partial(of, kind=kind, places=places)
        for kind, (title, places) in LATENCIES.items()
        if kind in known
    }
    note = (
        "By bench_serving. PARSE's tokens arrive in chunks, a whole accepted draft at a "
        "time: inter-token latency is the time between two chunks."
    )
    return _by_load(figures, columns, note, shown)


def _stage_times(figures: Comparison) -> Iterator[Grid]:
    if traced := [(one.variant.label, one.time) for one in figures.variants if one.time]:
        columns: Columns = {
            "": lambda label, _: label,
            **{f"{s}, ms": lambda _, time, s=s: f"{time.ms_per_request[s]:.0f}" for s in STAGES},
            "accepted": lambda _, time: f"{time.draft_fraction:.0%}",
            "matched": lambda _, time: f"{time.matched_fraction:.0%}",
            "rounds": lambda _, time: f"{time.rounds_per_request:.2f}",
            "limit": lambda _, time: _known(time.limit, "{:.2f}x"),
        }
        note = (
            "Per request, one at a time; medians over the runs. Accepted by a verdict, and matched "
            "after a rejection: of the output tokens. Limit: 1 / (r + v + 1 - a) over the plain "
            "target, with a the sum of both."
        )
        yield Grid.of(traced, columns, note)
    if any(speed.stages for one in figures.variants for speed in one.speeds):
        by_load: Columns = {
            **{s: lambda speed, s=s: _known(speed.stages.get(s), "{:.1%}") for s in STAGES},
            "rows per pass": lambda speed: _known(speed.rows_per_pass, "{:.0f}"),
            "ms per pass": lambda speed: _known(speed.ms_per_pass, "{:.1f}"),
        }
        note = "Of the time, all requests together, by the server's metrics; medians over the runs."
        yield _by_load(figures, by_load, note)


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


# -- sentences ----------------------------------------------------------------------------


def summary(figures: Comparison) -> Iterator[str]:
    """How much faster, how right, and what limits it, as far as it was measured."""
    parse = figures.find(Variant(PARSE))
    if parse is None:
        return
    over = [(s.concurrency, s.over[PLAIN].median) for s in parse.speeds if PLAIN in s.over]
    if over:
        speedups = ", ".join(f"{ratio:.1f}x at {concurrency}" for concurrency, ratio in over)
        yield f"PARSE's speed over the plain target: {speedups} requests at a time."
    found = (figures.find(Variant(name)) for name in (PARSE, PLAIN, DRAFT))
    yield f"Right answers: {', '.join(_graded(one) for one in found if one)}."
    time = parse.time
    if time is not None:
        limit = f" The upper bound of the speedup is {time.limit:.1f}x." if time.limit else ""
        yield (
            f"{time.draft_fraction + time.matched_fraction:.1%} of PARSE's output came from the "
            f"draft model: {time.draft_fraction:.1%} accepted by a verdict, "
            f"{time.matched_fraction:.1%} matched by the target's own choice.{limit}"
        )
    faster = [s.concurrency for s in parse.speeds if DRAFT in s.over and s.over[DRAFT].median > 1]
    if faster:
        yield (
            f"It was faster than the draft alone at {' and '.join(map(str, faster))}: in PARSE a "
            "parallel draft model writes several tokens per forward, in stock SGLang one."
        )


def _graded(one: VariantFigures) -> str:
    quality = one.quality
    if quality is None or quality.score is None:
        return f"{one.variant.label} not graded"
    return f"{one.variant.label} {quality.score:.1%} of {quality.problems}"
