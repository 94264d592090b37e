"""Output of ``sglang-parse bench``: results.json, a table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from sglang_parse.client.conditions import of_now
from sglang_parse.client.figures import rounded
from sglang_parse.client.records import PLAIN, STOCK, kind_of
from sglang_parse.client.servers import ServerSpec
from sglang_parse.client.tables import make_table
from sglang_parse.client.targets import command_of
from sglang_parse.limit.figures import SpeedAt
from sglang_parse.limit.settings import LimitSettings

RESULTS = "results.json"
NOTES = (
    "no trained weights: they are random and tiny, which a GPU multiplies at a higher clock than "
    "trained ones",
    "acceptance is simulated: verdicts are computed and ignored",
)
SETTINGS = (
    *("device", "attention_backend", "dtype", "input_len", "output_len"),
    *("draft_len", "block_tokens", "staggered", "runs", "drafting"),
)
COUNTERS = ("rounds", "drafted_tokens", "accepted_tokens", "draft_ms", "verify_ms", "decode_ms")
"""Columns of the table, per request."""


def report(
    settings: LimitSettings,
    specs: Sequence[ServerSpec],
    speeds: Sequence[SpeedAt],
    failed: dict[str, str],
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
        "failed": failed,
        "notes": NOTES,
    }
    return rounded({"conditions": conditions, "speeds": [asdict(row) for row in speeds]})


def show(console: Console, settings: LimitSettings, speeds: Sequence[SpeedAt]) -> None:
    """Prints the table and the path of the file."""
    stock = [name for name in settings.servers if kind_of(name) in (PLAIN, *STOCK)]
    table = make_table(
        "output tokens/s without trained weights, simulated acceptance; counters per request",
        (
            "at a time",
            "server",
            "tokens/s",
            *(f"over {name}" for name in stock),
            "limit",
            *COUNTERS,
        ),
    )
    for row in speeds:
        over = [f"{row.over[name]:.2f}x" if name in row.over else "" for name in stock]
        limit = f"{row.limit:.2f}x" if row.limit else ""
        counts = [f"{row.per_request[n]:.1f}" if n in row.per_request else "" for n in COUNTERS]
        rate = f"{row.tokens_per_s:.1f}"
        table.add_row(str(row.concurrency), row.server, rate, *over, limit, *counts)
    console.print(table)
    console.print(str(settings.output / RESULTS), highlight=False)
