"""What ``sglang-parse bench`` leaves behind: results.json, bench.html, tables on the screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import plotly.graph_objects as go
from rich.console import Console
from rich.table import Table

from sglang_parse.client.conditions import date, machine, versions
from sglang_parse.client.figures import Goal, rounded
from sglang_parse.client.page import PALETTE
from sglang_parse.client.servers import ServerSpec
from sglang_parse.client.tables import make_table, show_goals
from sglang_parse.client.targets import command_of
from sglang_parse.limit.figures import LimitFigures, what_rows_allow
from sglang_parse.limit.settings import LimitSettings

RESULTS, PLOT = "results.json", "bench.html"
COLOURS = [PALETTE[name] for name in ("blue", "red", "green", "purple", "orange", "sky")]
NOTES = (
    "no trained weights: they are random and tiny, which a GPU multiplies at a higher clock than "
    "trained ones",
    "acceptance is simulated: verdicts are computed and ignored",
)


_ASKED = (
    *("target", "draft", "device", "attention_backend", "baselines", "dtype", "input_len"),
    *("output_len", "draft_len", "staggered", "prefixes", "runs", "drafting"),
)
KEYS = {
    **dict.fromkeys(
        (f"conditions.{name}" for name in ("date", "seconds", "machine", "versions", "notes")),
        "when, where, with what",
    ),
    **dict.fromkeys((f"conditions.{name}" for name in _ASKED), "what the command line asked for"),
    "conditions.servers": "each server's command line",
    "conditions.environment": "each server's own environment variables",
    "kv_held.concurrency": "requests at a time",
    "card.copy_gb_per_s": "what the device can copy; null without `--limit`",
    "card.matrix_tflop_per_s": "what it can multiply; null without `--limit`",
}
"""Keys of ``report`` that are no field of its figures -> meaning."""


def report(
    settings: LimitSettings,
    specs: Sequence[ServerSpec],
    figures: LimitFigures,
    found: Sequence[Goal],
    seconds: float,
) -> dict[str, Any]:
    """What results.json holds; its keys are documented in docs/benchmark-keys.md."""
    verification = figures.verification
    ratios = {
        "over_prefill": verification.over_prefill,
        "over_prefill_rows": verification.over_prefill_rows,
    }
    content = {
        "conditions": _conditions(settings, specs, seconds),
        "speeds": [asdict(row) for row in figures.speeds],
        "pass": asdict(verification) | ratios,
        "masks": [asdict(mask) for mask in figures.masks],
        "memory": [asdict(memory) for memory in figures.memory],
        "kv_held": [
            {"concurrency": concurrency, "mean": held.mean, "peak": held.peak}
            for concurrency, held in figures.held.items()
        ],
        "card": figures.card
        and {
            "copy_gb_per_s": figures.card.bandwidth / 1e9,
            "matrix_tflop_per_s": figures.card.rate / 1e12,
        },
        "bounds": [asdict(bound) for bound in figures.bounds],
        "checks": [goal.as_json() for goal in found],
    }
    return rounded(content)


def _conditions(
    settings: LimitSettings, specs: Sequence[ServerSpec], seconds: float
) -> dict[str, Any]:
    return {
        "date": date(),
        "seconds": seconds,
        "machine": machine(),
        "versions": versions(),
        "target": settings.target.name,
        "draft": settings.draft.name,
        "device": settings.device,
        "attention_backend": settings.attention_backend,
        "baselines": list(settings.baselines),
        "dtype": settings.dtype,
        "input_len": settings.input_len,
        "output_len": settings.output_len,
        "draft_len": settings.draft_len,
        "staggered": settings.staggered,
        "prefixes": settings.prefixes,
        "runs": settings.runs,
        "drafting": settings.drafting,
        "servers": {spec.name: command_of(spec) for spec in specs},
        "environment": {spec.name: dict(spec.environment) for spec in specs},
        "notes": list(NOTES),
    }


def limit_plot(settings: LimitSettings, figures: LimitFigures) -> go.Figure:
    """Speedup over the accepted share, a colour per concurrency, its limit dashed."""
    plot = go.Figure()
    for colour, concurrency in zip(COLOURS * 9, settings.concurrencies, strict=False):
        rows = [row for row in figures.speeds if row.concurrency == concurrency]
        shares = [row.acceptance for row in rows]
        for what, values, line in (
            ("measured", [row.ratio for row in rows], {"color": colour}),
            ("limit", [row.limit for row in rows], {"color": colour, "dash": "dash"}),
        ):
            plot.add_scatter(
                name=f"{concurrency} at a time: {what}",
                x=shares,
                y=values,
                mode="lines+markers" if what == "measured" else "lines",
                line=line,
            )
    plot.add_hline(y=1, line={"color": PALETTE["grey"], "dash": "dot", "width": 1})
    title = (
        f"{settings.target.name} and {settings.draft.name} without weights, simulated acceptance, "
        f"{settings.device}"
    )
    plot.update_layout(template="plotly_white", title=title)
    plot.update_xaxes(title="share of every draft that is kept (simulated)")
    plot.update_yaxes(title="output tokens/s over the plain target's", rangemode="tozero")
    return plot


def show(
    console: Console, settings: LimitSettings, figures: LimitFigures, found: Sequence[Goal]
) -> None:
    """Tables, the figures to reach if there are any, where the files are."""
    for table in (_speed_table(figures), _parts_table(figures), _bounds_table(figures)):
        if table.row_count:
            console.print(table)
    verification = figures.verification
    console.print(
        f"one pass: {verification.rows} rows, {verification.ms:.2f} ms, "
        f"{verification.over_prefill:.2f}x a plain prefill of its draft tokens "
        f"({verification.prefill_ms:.2f} ms), {verification.over_prefill_rows:.2f}x one of as many "
        f"rows ({verification.prefill_rows_ms:.2f} ms)",
        highlight=False,
    )
    for line in _rows_lines(figures):
        console.print(line, highlight=False)
    show_goals(console, found)
    for name in (RESULTS, PLOT):
        console.print(str(settings.output / name), highlight=False)


def _rows_lines(figures: LimitFigures) -> Iterator[str]:
    """What a pass's rows allow where all of every draft is kept."""
    verification = figures.verification
    per_token = verification.rows / verification.draft_tokens
    ms_per_row = verification.prefill_rows_ms / verification.rows
    for row in figures.speeds:
        if row.acceptance == 1:
            yield (
                f"{row.concurrency} at a time: {per_token:.2f} rows a token at {ms_per_row:.3f} ms "
                f"a row of a prefill, {1e3 / row.draft_tokens_per_s:.3f} ms drafting, "
                f"{1e3 / row.plain_tokens_per_s:.3f} ms on {row.plain}: at best "
                f"{what_rows_allow(row, verification):.2f}x"
            )


def _speed_table(figures: LimitFigures) -> Table:
    title = "output tokens/s without trained weights, simulated acceptance"
    headings = ("at a time", "kept", "plain", "draft", "PARSE", "ratio", "r", "v", "limit", "of it")
    table = make_table(title, headings)
    for row in figures.speeds:
        table.add_row(
            str(row.concurrency),
            f"{row.acceptance:g}",
            f"{row.plain_tokens_per_s:.1f}",
            f"{row.draft_tokens_per_s:.1f}",
            f"{row.tokens_per_s:.1f}",
            f"{row.ratio:.2f}x",
            f"{row.r:.3f}",
            f"{row.v:.3f}",
            f"{row.limit:.2f}x",
            f"{row.share_of_limit:.0%}",
        )
    return table


def _parts_table(figures: LimitFigures) -> Table:
    table = make_table("masks, KV slots held by a request, memory", ("", "", ""))
    for mask in figures.masks:
        what = f"mask of a pass of {mask.concurrency}"
        packed = "" if mask.pack_ms is None else f", packed in {mask.pack_ms:.3f} ms"
        table.add_row(what, f"{mask.ms:.3f} ms", f"{mask.entries} entries{packed}")
    for concurrency, held in figures.held.items():
        what = f"KV slots held, {concurrency} at a time"
        table.add_row(what, f"{held.mean:.1f} mean", f"{held.peak} peak")
    for memory in figures.memory:
        peak = f"{memory.peak_gib:.2f} GiB peak"
        parts = f"{memory.weights_gib:.2f} weights, {memory.kv_gib:.2f} KV"
        table.add_row(f"memory of {memory.server}", peak, parts)
    return table


def _bounds_table(figures: LimitFigures) -> Table:
    card = figures.card
    title = (
        "" if card is None else f"{card.bandwidth / 1e9:.0f} GB/s, {card.rate / 1e12:.2f} Tflop/s"
    )
    table = make_table(
        title, ("stage", "at a time", "bound by", "at best, ms", "measured", "share")
    )
    for bound in figures.bounds:
        table.add_row(
            bound.stage,
            str(bound.concurrency),
            bound.by,
            f"{bound.floor_ms:.3f}",
            f"{bound.measured_ms:.3f}",
            f"{bound.share:.0%}",
        )
    return table
