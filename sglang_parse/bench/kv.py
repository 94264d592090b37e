"""KV slots held beyond the committed tokens: PARSE by phase, stock STANDALONE by standing reserve.

The same held-out problems go to three servers, one after the other; each logs, iteration by
iteration, what every running request holds (``harness.kv_log``).
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sglang_parse.bench.harness.ask import ask
from sglang_parse.bench.harness.demo_pair import DEMO_PAIR, demo_models
from sglang_parse.bench.harness.flags import Flags, option
from sglang_parse.bench.harness.kv_log import KV_LOG, Held
from sglang_parse.bench.harness.lineup import lineup
from sglang_parse.bench.harness.pool import Pool
from sglang_parse.bench.harness.program import write_json
from sglang_parse.bench.harness.records import PARSE, STANDALONE
from sglang_parse.bench.harness.servers import ServerSpec
from sglang_parse.bench.harness.tables import make_table
from sglang_parse.bench.tasks.demo import demo_assignment
from sglang_parse.core.config import ParseConfig

SHORT_DRAFT = 5
"""STANDALONE's customary number of draft steps."""


def measure(spec: ServerSpec, num_problems: int, concurrency: int, folder: Path) -> Held:
    """Start the server, send the load, end the server.

    Raises:
        BenchError: the server or a request failed.
    """
    problems = demo_assignment(num_problems).items
    log = (folder / f"{spec.name}.kv.jsonl").resolve()
    log.unlink(missing_ok=True)
    spec = replace(spec, environment=((KV_LOG, str(log)),))
    with Pool([spec], folder) as pool, pool.awake(spec.name) as (server,):
        log.write_text("")  # SGLang's own warm-up requests are not the load
        leg = ask(server, problems, range(num_problems), concurrency=concurrency)
    return Held.of(log.read_text().splitlines(), round(leg.tokens_per_s, 1))


@dataclass(frozen=True)
class KvSettings(Flags):
    """What the command line of ``sglang-parse bench-kv`` can ask for."""

    pair: Path = option(DEMO_PAIR, "folder with target/, draft/", type=Path)
    problems: int = option(32, "per server (default 32)", type=int)
    concurrency: int = option(8, "requests at a time", type=int)
    output: Path = option(Path("build/bench_kv.json"), type=Path)


add_arguments = KvSettings.add_arguments


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Measure, print the table, write the JSON file. Raises: BenchError."""
    settings = KvSettings.read(arguments)
    servers = _servers(settings.pair)
    folder = settings.output.parent / "bench-kv-logs"
    folder.mkdir(parents=True, exist_ok=True)
    results = {}
    for title, spec in servers.items():
        console.print(f"{title} ...")
        results[title] = measure(spec, settings.problems, settings.concurrency, folder)
    write_json(settings.output, {title: asdict(held) for title, held in results.items()})
    console.print(_table(results))
    return 0


def _servers(pair: Path) -> dict[str, ServerSpec]:
    """PARSE, and stock STANDALONE with chains of customary length and of PARSE's.

    Raises:
        BenchError: the pair is not there.
    """
    models, long_draft = demo_models(pair), ParseConfig().draft_tokens
    (parse,) = lineup(models, (PARSE,))
    servers = {f"PARSE, drafts up to {long_draft} tokens": parse}
    for name, num_steps in (("short", SHORT_DRAFT), ("long", long_draft)):
        (stock,) = lineup(replace(models, standalone_steps=num_steps), (STANDALONE,))
        servers[f"STANDALONE, drafts of {num_steps}"] = replace(stock, name=name)
    return servers


def _table(results: dict[str, Held]) -> Table:
    title = "KV slots held per request beyond its committed tokens"
    table = make_table(title, ("server", "mean", "peak", "iterations", "tokens/s"))
    for name, held in results.items():
        values = (held.mean, held.peak, held.iterations, held.tokens_per_s)
        table.add_row(name, *map(str, values))
    return table
