"""Runs of the speed benchmark to figures, medians over the runs: results.json, and a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from rich.table import Table

from sglang_parse.client.conditions import of_now
from sglang_parse.client.records import PLAIN, Answer, BenchRun, has_parse
from sglang_parse.client.servers import ServerSpec
from sglang_parse.client.statistics import costs_of, limit_of, rounded
from sglang_parse.client.tables import make_table
from sglang_parse.client.targets import command_of
from sglang_parse.limit.settings import LimitSettings

NOTES = (
    "no trained weights: they are random and tiny, which a GPU multiplies at a higher clock than "
    "trained ones",
    "acceptance is simulated: verdicts are computed and ignored",
)
SETTINGS = (
    *("device", "attention_backend", "dtype", "input_len", "output_len"),
    *("draft_len", "block_tokens", "runs", "drafting"),
)
COUNTERS = ("rounds", "drafted_tokens", "accepted_tokens", "draft_ms", "verify_ms", "decode_ms")
"""Columns of the table, per request."""


@dataclass(frozen=True, slots=True)
class ServerSpeed:
    """A server at one concurrency.

    Attributes:
        server: its kind, KIND@VALUE with simulated acceptance.
        concurrency: requests at a time.
        tokens_per_s: output tokens per second.
        over: server without PARSE -> speedup over it, of those measured so far.
        limit: of this speedup over the plain target, by the server's own stage times and accepted
            tokens (``client.statistics``); null without PARSE, or before the plain target.
        per_request: counter of ``meta_info`` -> mean of the requests: SGLang's accept length, and
            all numbers of ``meta_info["parse"]``.
    """

    server: str
    concurrency: int
    tokens_per_s: float
    over: dict[str, float]
    limit: float | None
    per_request: dict[str, float]


def speeds(runs: Sequence[BenchRun]) -> list[ServerSpeed]:
    """A row per concurrency and server, in the order in which they were measured."""
    found: dict[tuple[int, str], list[BenchRun]] = {}
    for run in runs:
        found.setdefault((run.concurrency, run.variant.server), []).append(run)
    rates = {key: median(run.tokens_per_s for run in some) for key, some in found.items()}
    rows = []
    for concurrency, server in sorted(found, key=lambda key: key[0]):
        timed, rate = found[concurrency, server], rates[concurrency, server]
        others = [name for at, name in found if at == concurrency and name != server]
        over = {n: rate / rates[concurrency, n] for n in others if not has_parse(n)}
        plain = rates.get((concurrency, PLAIN)) if has_parse(server) else None
        limit = plain and median(limit_of(*costs_of(run, 1e3 / plain)) for run in timed)
        answers = [answer for run in timed for answer in run.answers]
        rows.append(ServerSpeed(server, concurrency, rate, over, limit, _means(answers)))
    return rows


def _means(answers: Sequence[Answer]) -> dict[str, float]:
    """Of the numbers that all answers have."""
    key = "spec_accept_length"
    counts = [
        {**answer.parse, **({key: answer.meta[key]} if key in answer.meta else {})}
        for answer in answers
    ]
    names = [n for n in counts[0] if all(isinstance(one.get(n), int | float) for one in counts)]
    return {name: fmean(one[name] for one in counts) for name in names}


def content(
    settings: LimitSettings,
    specs: Sequence[ServerSpec],
    speeds: Sequence[ServerSpeed],
    failed: dict[str, str],
    seconds: float,
) -> dict[str, Any]:
    """results.json; its keys are documented in docs/benchmark-keys.md."""
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


def table(speeds: Sequence[ServerSpeed]) -> Table:
    others = list(dict.fromkeys(row.server for row in speeds if not has_parse(row.server)))
    over = (f"over {name}" for name in others)
    found = make_table(
        "output tokens/s without trained weights, simulated acceptance; counters per request",
        ("at a time", "server", "tokens/s", *over, "limit", *COUNTERS),
    )
    for row in speeds:
        over = (f"{row.over[name]:.2f}x" if name in row.over else "" for name in others)
        limit, rate = f"{row.limit:.2f}x" if row.limit else "", f"{row.tokens_per_s:.1f}"
        counts = (f"{row.per_request[n]:.1f}" if n in row.per_request else "" for n in COUNTERS)
        found.add_row(f"{row.concurrency}", row.server, rate, *over, limit, *counts)
    return found
