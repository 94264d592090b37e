"""What a bystander waits for: the longest gap between the events of its stream beside requests that
are meant to hold the server up, relative to the same requests without what makes them hostile.

    PYTHONPATH=tests python -m soak.gaps
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

from rich.console import Console

from sglang_parse.cli import end_on_sigterm
from sglang_parse.client.demo_pair import DEMO_PAIR
from sglang_parse.client.pool import Pool
from sglang_parse.client.program import run_program, write_json
from sglang_parse.client.records import PARSE_HEAD, PARSE_TOKEN
from sglang_parse.client.tables import make_table
from sglang_parse.client.targets import Models, server_specs
from support.client import Client, chunks_of, random_prompts
from support.hostile_grammars import GRAMMARS

SETTLE_S = 0.5
"""Of the bystander's stream before and after the requests."""
LONGEST_PREDICTION = 1 << 22
OFF = {"enabled": False}
Requests = Sequence[dict[str, Any]]


def request(place: int, parse: dict[str, Any], **sampling: Any) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": 24, "custom_params": {"parse": parse}}
    return {"input_ids": random_prompts(64, 7)[place], "sampling_params": {**params, **sampling}}


def predicted(count: int, text: str) -> tuple[Requests, Requests]:
    short = {"max_new_tokens": 2}
    with_it = [request(place, {"draft": text}, **short) for place in range(count)]
    return with_it, [request(place, {}, **short) for place in range(count)]


def inputs() -> dict[str, tuple[Requests, Requests]]:
    """Name -> hostile requests, and the same ones as stock SGLang serves them, or without the
    prediction."""
    noise = " ".join(map(str, random.Random(3).choices(range(10**5), k=40_000)))
    found = {
        f"grammar: {name}": ([request(0, {}, **grammar)], [request(0, OFF, **grammar)])
        for name, grammar in GRAMMARS.items()
    }
    return found | {
        "40 predictions at once": predicted(40, noise[:2_000]),
        "64 predictions at once": predicted(64, noise[:2_000]),
        "a prediction of noise": predicted(1, noise),
        "the longest prediction": predicted(1, noise * (LONGEST_PREDICTION // len(noise))),
    }


class Bystander:
    """A stream of plain decode steps."""

    def __init__(self, client: Client) -> None:
        self._client, self._is_over, self.times = client, Event(), []

    def read(self) -> None:
        params = {"temperature": 0, "max_new_tokens": 4_000, "ignore_eos": True}
        params["custom_params"] = {"parse": OFF}
        body = {"input_ids": random_prompts(1, 9)[0], "sampling_params": params}
        for _ in chunks_of(self._client, "/generate", body):
            self.times.append(time.perf_counter())
            if self._is_over.is_set():
                return

    def end(self) -> None:
        self._is_over.set()


def longest_gap_ms(client: Client, requests: Requests) -> float:
    """Of the bystander, while the requests run."""
    bystander = Bystander(client)
    with ThreadPoolExecutor(1 + len(requests)) as pool:
        reading = pool.submit(bystander.read)
        time.sleep(SETTLE_S)
        started = time.perf_counter()
        sent = [pool.submit(client.post, "/generate", body) for body in requests]
        for one in sent:
            one.result()
        ended = time.perf_counter()
        time.sleep(SETTLE_S)
        bystander.end()
        reading.result()
    gaps = itertools.pairwise(bystander.times)
    return 1e3 * max(end - start for start, end in gaps if end > started and start < ended)


def measure(client: Client, runs: int, note: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Name -> medians of both gaps in ms, and their quotient."""
    found = {}
    for name, pair in inputs().items():
        note(name)
        gaps = [[longest_gap_ms(client, requests) for requests in pair] for _ in range(runs)]
        hostile, harmless = (statistics.median(column) for column in zip(*gaps, strict=True))
        found[name] = {"hostile_ms": hostile, "ms": harmless, "ratio": hostile / harmless}
    return found


def run(arguments: argparse.Namespace, console: Console) -> int:
    names = (PARSE_HEAD, PARSE_TOKEN)
    models = Models(
        target=str(DEMO_PAIR / "target"),
        draft=str(DEMO_PAIR / "draft"),
        judge=str(DEMO_PAIR / "judge"),
    )
    results = {}
    logs = arguments.output.parent / "gaps_logs"
    with Pool(server_specs(models, names), logs) as pool:
        for name in names:
            with pool.awake(name) as (server,):
                measure(Client(server.url), 1, lambda _: None)  # compiles grammars
                results[name] = measure(Client(server.url), arguments.runs, console.log)
    for name, found in results.items():
        table = make_table(name, ("", "hostile, ms", "harmless, ms", "ratio"))
        for one, row in found.items():
            table.add_row(one, *(f"{row[key]:.1f}" for key in ("hostile_ms", "ms", "ratio")))
        console.print(table)
    write_json(arguments.output, results)
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="soak.gaps", description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="of each input; default %(default)s")
    parser.add_argument("--output", type=Path, default=Path("build/gaps.json"))
    return parser


if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(run_program("gaps", run, make_parser().parse_args()))
