"""Output of ``sglang-parse bench``: results.json, bench.html, tables on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import plotly.graph_objects as go
from rich.console import Console

from sglang_parse.client.conditions import date, machine, versions
from sglang_parse.client.figures import Goal, rounded
from sglang_parse.client.page import PALETTE
from sglang_parse.client.servers import ServerSpec
from sglang_parse.client.tables import make_table, show_goals
from sglang_parse.client.targets import command_of
from sglang_parse.limit.figures import LimitFigures
from sglang_parse.limit.settings import LimitSettings

RESULTS, PLOT = "results.json", "bench.html"
COLOURS = [PALETTE[name] for name in ("blue", "red", "green", "purple", "orange", "sky")]
NOTES = (
    "no trained weights: they are random and tiny, which a GPU multiplies at a higher clock than "
    "trained ones",
    "acceptance is simulated: verdicts are computed and ignored",
)
_SETTINGS = (
    *("device", "attention_backend", "baselines", "dtype", "input_len", "output_len"),
    *("draft_len", "staggered", "prefixes", "runs", "drafting"),
)
KEYS = {
    **dict.fromkeys(
        (f"conditions.{name}" for name in ("date", "seconds", "machine", "versions", "notes")),
        "conditions of the run",
    ),
    **dict.fromkeys(
        (f"conditions.{name}" for name in ("target", "draft", *_SETTINGS)), "from the command line"
    ),
    "conditions.servers": "each server's command line",
    "conditions.environment": "each server's own environment variables",
    "card.copy_gb_per_s": "copy bandwidth of the device; null without `--limit`",
    "card.matrix_tflop_per_s": "its rate of a matrix product; null without `--limit`",
}
"""Keys of ``report`` that are no field of its figures -> meaning."""


def report(
    settings: LimitSettings,
    specs: Sequence[ServerSpec],
    figures: LimitFigures,
    goals: Sequence[Goal],
    seconds: float,
) -> dict[str, Any]:
    """Returns the content of results.json; its keys are documented in docs/benchmark-keys.md."""
    conditions = {
        "date": date(),
        "seconds": seconds,
        "machine": machine(),
        "versions": versions(),
        "target": settings.target.name,
        "draft": settings.draft.name,
        **{name: getattr(settings, name) for name in _SETTINGS},
        "servers": {spec.name: command_of(spec) for spec in specs},
        "environment": {spec.name: dict(spec.environment) for spec in specs},
        "notes": NOTES,
    }
    card = figures.card and {
        "copy_gb_per_s": figures.card.bandwidth / 1e9,
        "matrix_tflop_per_s": figures.card.rate / 1e12,
    }
    checks = [goal.as_json() for goal in goals]
    return rounded({"conditions": conditions, **asdict(figures), "card": card, "checks": checks})


def limit_plot(settings: LimitSettings, figures: LimitFigures) -> go.Figure:
    """Speedup over simulated acceptance, a colour per concurrency, its limit dashed."""
    plot = go.Figure()
    for colour, concurrency in zip(COLOURS * 9, settings.concurrencies, strict=False):
        rows = [row for row in figures.speeds if row.concurrency == concurrency]
        for name, values, dash in (
            ("measured", [row.speedup for row in rows], "solid"),
            ("limit", [row.limit for row in rows], "dash"),
        ):
            plot.add_scatter(
                name=f"{concurrency} at a time: {name}",
                x=[row.acceptance for row in rows],
                y=values,
                mode="lines+markers" if name == "measured" else "lines",
                line={"color": colour, "dash": dash},
            )
    plot.add_hline(y=1, line={"color": PALETTE["grey"], "dash": "dot", "width": 1})
    title = (
        f"{settings.target.name} and {settings.draft.name} without weights, simulated acceptance, "
        f"{settings.device}"
    )
    plot.update_layout(template="plotly_white", title=title)
    plot.update_xaxes(title="simulated acceptance")
    plot.update_yaxes(title="speedup over the plain target", rangemode="tozero")
    return plot


def show(
    console: Console, settings: LimitSettings, figures: LimitFigures, goals: Sequence[Goal]
) -> None:
    """Prints tables, the goals if any, and the paths of the files."""
    for title, headings, rows in _tables(figures):
        table = make_table(title, headings)
        for row in rows:
            table.add_row(*row)
        if rows:
            console.print(table)
    verify = figures.verify
    console.print(
        f"one verify pass: {verify.rows} rows, {verify.ms:.2f} ms; a plain prefill of its draft: "
        f"{verify.prefill_ms:.2f} ms, of as many rows: {verify.prefill_rows_ms:.2f} ms",
        highlight=False,
    )
    show_goals(console, goals)
    for name in (RESULTS, PLOT):
        console.print(str(settings.output / name), highlight=False)


def _tables(figures: LimitFigures) -> list[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
    """Title, headings and rows of each table."""
    speeds = [
        (
            *(str(row.concurrency), f"{row.acceptance:g}", f"{row.plain_tokens_per_s:.1f}"),
            *(f"{row.draft_tokens_per_s:.1f}", f"{row.tokens_per_s:.1f}", f"{row.speedup:.2f}x"),
            *(f"{row.r:.3f}", f"{row.v:.3f}", f"{row.limit:.2f}x", f"{row.limit_fraction:.0%}"),
        )
        for row in figures.speeds
    ]
    memory = [
        (one.server, *(f"{gib:.2f}" for gib in (one.used_gib, one.weights_gib, one.kv_gib)))
        for one in figures.memory
    ]
    bounds = [
        (
            *(one.stage, str(one.concurrency), one.by),
            *(f"{one.floor_ms:.3f}", f"{one.measured_ms:.3f}", f"{one.fraction:.0%}"),
        )
        for one in figures.bounds
    ]
    card = figures.card
    speed = f"{card.bandwidth / 1e9:.0f} GB/s, {card.rate / 1e12:.2f} Tflop/s" if card else ""
    return [
        (
            "output tokens/s without trained weights, simulated acceptance",
            (
                "at a time",
                "accepted",
                "plain",
                "draft",
                "PARSE",
                "speedup",
                "r",
                "v",
                "limit",
                "of it",
            ),
            speeds,
        ),
        ("memory, GiB", ("server", "used", "weights", "KV"), memory),
        (speed, ("stage", "at a time", "bound by", "at least, ms", "measured", "fraction"), bounds),
    ]
