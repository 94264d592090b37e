"""The order of events: servers take turns, each under every load, run by run."""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sglang_parse.client.ask import Asking
from sglang_parse.client.conditions import date, machine, versions
from sglang_parse.client.demo_pair import demo_tokenizer
from sglang_parse.client.pool import Pool
from sglang_parse.client.program import Teller, write_json
from sglang_parse.client.records import Item
from sglang_parse.client.servers import Server
from sglang_parse.client.tables import make_table
from sglang_parse.client.targets import command_of
from sglang_parse.load.figures import LoadFigures, Run, figures_of
from sglang_parse.load.names import title_of
from sglang_parse.load.settings import LoadSettings
from sglang_parse.load.stages import stage_shares
from sglang_parse.load.stream import Load, drive
from sglang_parse.tasks.demo import demo_assignment

LIMIT_S = 1800.0
WARM_UP = 8
"""Answers of a server before it is timed, at least: its first ones are its slowest, and PARSE
learns prices from them, and tries drafts more often."""
HEADINGS = (
    "server",
    "tokens/s",
    "over first",
    "TTFT",
    "gap",
    "longest gap",
    "end to end",
    "draft",
    "pass",
)
KEYS = {
    "conditions.machine": "processor, CPUs, memory, system, accelerators",
    "conditions.versions": "of Python and of packages",
    "conditions.commands": "of every server that was started here",
    "conditions.date": "when it ended",
    "conditions.runs": "closed loops per line",
    "conditions.fresh": "whether servers were started anew for each of them",
    "conditions.seconds": "the whole program, server starts included",
}
"""Keys of results.json beside ``lines``: key -> meaning."""


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Measure, write results.json, print tables. Raises: BenchError."""
    settings, say = LoadSettings.read(arguments), Teller(console)
    specs = settings.specs
    with Pool(
        specs,
        settings.output / "logs",
        remotes=settings.remotes,
        on_start=lambda name: say(f"start {title_of(name)}"),
    ) as pool:
        runs = _play(settings, pool, say)
    first = settings.names[0]
    lines = [
        line
        for concurrency in settings.concurrencies
        for name in settings.names
        for share in settings.shares(name)
        for line in figures_of(
            runs[name, concurrency, share],
            runs[first, concurrency, settings.shares(first)[0]],
        )
    ]
    conditions = {
        "date": date(),
        "machine": machine(),
        "versions": versions(),
        "commands": {spec.name: command_of(spec) for spec in specs},
        "runs": settings.runs,
        "fresh": settings.fresh,
        "seconds": round(say.seconds),
    }
    content = {"lines": [asdict(line) for line in lines], "conditions": conditions}
    write_json(settings.output / "results.json", content, indent=1)
    for concurrency in settings.concurrencies:
        console.print(_table([line for line in lines if line.concurrency == concurrency]))
    return 0


def _play(
    settings: LoadSettings, pool: Pool, say: Teller
) -> dict[tuple[str, int, float], list[Run]]:
    """(Server, concurrency, share switched off) -> its runs."""
    loads, runs = _Loads(settings), defaultdict(list)
    for number in range(settings.runs):
        starts = number == 0 or settings.fresh
        if starts:
            pool.stop()
            pool.start_all()
        for name in settings.order(number):
            say(f"run {number + 1} of {settings.runs}: {title_of(name)}")
            with pool.awake(name) as (endpoint,):
                if starts:
                    drive(endpoint, loads.warm_up())
                for concurrency, share in product(settings.concurrencies, settings.shares(name)):
                    if isinstance(endpoint, Server):  # not what others may be using
                        endpoint.flush()
                    with stage_shares(endpoint) as stages:
                        streams = drive(endpoint, loads.load(number, concurrency, share))
                    run = Run(name, concurrency, share, streams, stages)
                    runs[name, concurrency, share].append(run)
    return runs


class _Loads:
    """The loads of all runs, each with problems of its own."""

    def __init__(self, settings: LoadSettings) -> None:
        self._settings = settings
        self._counts = [settings.num_requests(c) for c in settings.concurrencies]
        self._shares = sorted({0.0, *settings.off_shares})
        total = settings.runs * sum(self._counts) * len(self._shares)
        self._num_warm_up = max(WARM_UP, *settings.concurrencies)
        self.task = demo_assignment(total + self._num_warm_up, settings.max_tokens)
        self._asking = Asking(settings.model_name, limit_s=LIMIT_S)
        self._length_of = _solution_length(settings.pair) if settings.acceptances else None

    def warm_up(self) -> Load:
        """What comes before the first timed answer."""
        items = self.task.items[-self._num_warm_up :]
        at_once = max(self._settings.concurrencies)
        return Load(items, [False] * len(items), self._limits(items), at_once, self._asking)

    def load(self, run: int, concurrency: int, off_share: float) -> Load:
        """The same problems for every server."""
        settings = self._settings
        place = settings.concurrencies.index(concurrency)
        count = self._counts[place]
        number = run * len(self._shares) + self._shares.index(off_share)
        start = number * sum(self._counts) + sum(self._counts[:place])
        # Spread evenly: of a half every second one.
        is_off = [math.floor((i + 1) * off_share) > math.floor(i * off_share) for i in range(count)]
        items = self.task.items[start : start + count]
        return Load(items, is_off, self._limits(items), concurrency, self._asking)

    def _limits(self, items: Sequence[Item]) -> list[int]:
        """Where a wrong part of a draft is kept, an answer may go astray and not come to its end:
        a few such answers would decide, if they were not as short as right ones."""
        most = self._settings.max_tokens
        if self._length_of is None:
            return [most] * len(items)
        return [min(most, self._length_of(item)) for item in items]


def _solution_length(pair: Path) -> Callable[[Item], int]:
    """Tokens of a problem's right answer, its end included."""
    tokenizer = demo_tokenizer(pair)
    return lambda item: len(tokenizer.encode(item.reference.solution).ids) + 1


def _table(lines: Sequence[LoadFigures]) -> Table:
    title = f"{lines[0].concurrency} at a time; ms, p50 / p99; shares of the time"
    table = make_table(title, HEADINGS)
    for line in lines:
        pairs = (
            (line.ttft_p50_ms, line.ttft_p99_ms),
            (line.gap_p50_ms, line.gap_p99_ms),
            (line.longest_p50_ms, line.longest_p99_ms),
            (line.e2e_p50_ms, line.e2e_p99_ms),
        )
        texts = (f"{middle:.0f} / {high:.0f}" for middle, high in pairs)
        spent = (line.draft_share, line.verify_share)
        shares = ("" if share is None else f"{share:.1%}" for share in spent)
        speeds = (f"{line.tokens_per_s:.0f}", f"{line.over_first:.2f}x")
        table.add_row(line.title, *speeds, *texts, *shares)
    return table
