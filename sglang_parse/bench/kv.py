"""KV slots held beyond the committed tokens: PARSE by phase, stock STANDALONE by standing reserve.

The same held-out problems go to three servers, one after the other; each logs, iteration by
iteration, what every running request holds (``harness.kv_log``).
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sglang_parse.bench.harness.ask import ask
from sglang_parse.bench.harness.demo_pair import DEMO_PAIR, demo_models
from sglang_parse.bench.harness.kv_log import KV_LOG, Held, summarise
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
    return summarise(log.read_text().splitlines(), round(leg.tokens_per_s, 1))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``sglang-parse bench-kv``."""
    parser.add_argument("--pair", type=Path, default=DEMO_PAIR, help="folder with target/, draft/")
    parser.add_argument("--problems", type=int, default=32, help="per server (default 32)")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at a time")
    parser.add_argument("--output", type=Path, default=Path("build/bench_kv.json"))


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Measure, print the table, write the JSON file. Raises: BenchError."""
    folder = arguments.output.parent / "bench-kv-logs"
    folder.mkdir(parents=True, exist_ok=True)
    results = {}
    for title, spec in _servers(arguments.pair).items():
        console.print(f"{title} ...")
        results[title] = measure(spec, arguments.problems, arguments.concurrency, folder)
    write_json(arguments.output, {title: asdict(held) for title, held in results.items()})
    console.print(_table(results))
    return 0


def _servers(pair: Path) -> dict[str, ServerSpec]:
    """PARSE, and stock STANDALONE with chains of customary length and of PARSE's."""
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
