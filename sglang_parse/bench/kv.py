"""KV slots held beyond the committed tokens: PARSE by phase, stock STANDALONE by standing reserve.

The same held-out problems go to three servers, one after the other; each logs, iteration by
iteration, what every running request holds (``patches.kv_log``).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sglang_parse.bench.compare.lineup import chain
from sglang_parse.bench.demo.load import send_problems
from sglang_parse.bench.demo.records import PARSE, DemoError
from sglang_parse.bench.demo.run import load_problems, specs
from sglang_parse.bench.demo.servers import Server, ServerSpec, free_ports
from sglang_parse.bench.demo.settings import DEMO_PAIR
from sglang_parse.core.config import ParseConfig

KV_LOG = "SGLANG_PARSE_KV_LOG"
SHORT_DRAFT = 5
"""STANDALONE's customary number of draft steps."""


@dataclass(frozen=True, slots=True)
class Held:
    """KV slots one request holds beyond its committed tokens.

    Attributes:
        mean, peak: over all requests and iterations.
        iterations: how many were logged.
        tokens_per_s: output tokens per second of the load.
    """

    mean: float
    peak: int
    iterations: int
    tokens_per_s: float


def summarise(lines: Iterable[str], tokens_per_s: float) -> Held:
    """From a log with one JSON list of held slots per iteration.

    Raises:
        ValueError: nothing was logged.
    """
    iterations = [json.loads(line) for line in lines]
    held = [slots for iteration in iterations for slots in iteration]
    if not held:
        raise ValueError("the server logged no iteration: was the plugin loaded?")
    return Held(round(statistics.fmean(held), 1), max(held), len(iterations), tokens_per_s)


def standalone(name: str, pair: Path, num_steps: int) -> ServerSpec:
    """Stock STANDALONE with chains of ``num_steps`` draft tokens."""
    stock = chain("STANDALONE", str(pair / "draft"), num_steps)
    return ServerSpec(name, ("--model-path", str(pair / "target"), *stock))


def measure(spec: ServerSpec, num_problems: int, concurrency: int, folder: Path) -> Held:
    """Start the server, send the load, end the server.

    Raises:
        DemoError: the server or a request failed.
    """
    module = load_problems()
    log = folder / f"{spec.name}.kv.jsonl"
    log.unlink(missing_ok=True)
    os.environ[KV_LOG] = str(log.resolve())
    try:
        server = Server(spec, free_ports(1)[0], folder / f"{spec.name}.log")
    finally:
        del os.environ[KV_LOG]
    try:
        server.wait_ready()
        log.write_text("")  # SGLang's own warm-up requests are not the load
        leg = send_problems(
            server,
            module.held_out_problems(num_problems),
            range(num_problems),
            module.is_answer_right,
            run=0,
            concurrency=concurrency,
        )
    finally:
        server.stop()
    num_tokens = sum(answer.output_tokens for answer in leg.answers)
    return summarise(log.read_text().splitlines(), round(num_tokens / leg.seconds, 1))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``sglang-parse bench-kv``."""
    parser.add_argument("--pair", type=Path, default=DEMO_PAIR, help="folder with target/, draft/")
    parser.add_argument("--problems", type=int, default=32, help="per server (default 32)")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at a time")
    parser.add_argument("--output", type=Path, default=Path("build/bench_kv.json"))


def main(arguments: argparse.Namespace) -> int:
    """Exit code: 0 when everything was measured, 1 otherwise."""
    try:
        run(arguments, Console())
    except DemoError as error:
        print(f"sglang-parse bench-kv: {error}", file=sys.stderr)
        return 1
    return 0


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure, print the table, write the JSON file. Raises: DemoError."""
    folder = arguments.output.parent / "bench-kv-logs"
    folder.mkdir(parents=True, exist_ok=True)
    long_draft = ParseConfig().draft_tokens
    (parse,) = [spec for spec in specs(arguments.pair) if spec.name == PARSE]
    rows = {
        f"PARSE, drafts up to {long_draft} tokens": parse,
        f"STANDALONE, drafts of {SHORT_DRAFT}": standalone("short", arguments.pair, SHORT_DRAFT),
        f"STANDALONE, drafts of {long_draft}": standalone("long", arguments.pair, long_draft),
    }
    results = {}
    for title, spec in rows.items():
        console.print(f"{title} ...")
        results[title] = measure(spec, arguments.problems, arguments.concurrency, folder)
    content = {title: asdict(held) for title, held in results.items()}
    arguments.output.write_text(json.dumps(content, indent=2) + "\n")
    console.print(_table(results))


def _table(results: dict[str, Held]) -> Table:
    table = Table(title="KV slots held per request beyond its committed tokens")
    headings: Sequence[str] = ("server", "mean", "peak", "iterations", "tokens/s")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "server" else "right")
    for title, held in results.items():
        values = (held.mean, held.peak, held.iterations, held.tokens_per_s)
        table.add_row(title, *map(str, values))
    return table
