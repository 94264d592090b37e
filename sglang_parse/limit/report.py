"""Output of ``sglang-parse bench``: results.json, bench.html, a table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import plotly.graph_objects as go
from rich.console import Console

from sglang_parse.client.conditions import of_now
from sglang_parse.client.figures import rounded
from sglang_parse.client.page import PALETTE
from sglang_parse.client.servers import ServerSpec
from sglang_parse.client.tables import make_table
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
SETTINGS = (
    *("device", "attention_backend", "baselines", "dtype", "input_len", "output_len"),
    *("draft_len", "staggered", "prefixes", "runs", "drafting"),
)
SPEEDS = {
    "at a time": "{0.concurrency}",
    "accepted": "{0.acceptance:g}",
    "plain": "{0.plain_tokens_per_s:.1f}",
    "draft": "{0.draft_tokens_per_s:.1f}",
    "PARSE": "{0.tokens_per_s:.1f}",
    "speedup": "{0.speedup:.2f}x",
    "r": "{0.r:.3f}",
    "v": "{0.v:.3f}",
    "limit": "{0.limit:.2f}x",
    "of it": "{0.limit_fraction:.0%}",
}
"""Heading -> format of a cell."""


def report(
    settings: LimitSettings,
    specs: Sequence[ServerSpec],
    figures: LimitFigures,
    seconds: float,
) -> dict[str, Any]:
    """Returns the content of results.json; its keys are documented in docs/benchmark-keys.md."""
    conditions = {
        **of_now(),
        "seconds": seconds,
        "target": settings.target.name,
        "draft": settings.draft.name,
        **{name: getattr(settings, name) for name in SETTINGS},
        "servers": {spec.name: command_of(spec) for spec in specs},
        "environment": {spec.name: dict(spec.environment) for spec in specs},
        "notes": NOTES,
    }
    return rounded({"conditions": conditions, **asdict(figures)})


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


def show(console: Console, settings: LimitSettings, figures: LimitFigures) -> None:
    """Prints the table, the verify pass and the paths of the files."""
    title = "output tokens/s without trained weights, simulated acceptance"
    table = make_table(title, tuple(SPEEDS))
    for row in figures.speeds:
        table.add_row(*(cell.format(row) for cell in SPEEDS.values()))
    console.print(table)
    verify = figures.verify
    console.print(
        f"one verify pass: {verify.rows} rows, {verify.ms:.2f} ms; a plain prefill of its draft: "
        f"{verify.prefill_ms:.2f} ms, of as many rows: {verify.prefill_rows_ms:.2f} ms",
        highlight=False,
    )
    for name in (RESULTS, PLOT):
        console.print(str(settings.output / name), highlight=False)
