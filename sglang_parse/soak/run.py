"""``sglang-parse soak``: many mixed requests at once; nothing may fail, leak or come out different.

The exact half of the load goes to a plain server first. Then the whole load goes to a PARSE server
that checks its own slots in every iteration, and each answer is compared with what it must be.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from sglang_parse.client.demo_pair import DEMO_PAIR, demo_models, load_problems
from sglang_parse.client.flags import Flags, option
from sglang_parse.client.pool import Pool
from sglang_parse.client.program import write_json
from sglang_parse.client.records import PARSE, PLAIN
from sglang_parse.client.servers import COMMON_FLAGS, ServerSpec
from sglang_parse.client.tables import make_progress, make_table
from sglang_parse.client.targets import parse_settings, server_specs
from sglang_parse.core.config import flag
from sglang_parse.soak.drive import Outcome, drive, leaks, plain_answers
from sglang_parse.soak.load import Render, SoakRequest, make_request

NUM_PROBLEMS = 2_000
SHORT_ROUNDS = parse_settings(draft_tokens=24, draft_chunk=8, drafting="always")
"""More rounds and more changes of phase per second than with drafts of a whole answer; drafts also
where they cannot pay, because nothing of them may be kept."""
MAX_SHOWN = 10


def make_load(count: int, seed: int, render: Render) -> list[SoakRequest]:
    """``count`` requests on held-out problems."""
    problems = load_problems().held_out_problems(NUM_PROBLEMS, seed=seed)
    return [make_request(number, seed, problems, render) for number in range(count)]


def chat_renderer(model: Path) -> Render:
    """Prompts as the model's chat template makes them."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    return partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)


@dataclass(frozen=True, slots=True)
class Report:
    """The soak's result.

    Attributes:
        requests, exact: how many were sent, and how many of them compared with the plain server.
        errors, wrong_bytes, leaks: what must be zero.
        ends, modes, kinds: how many requests of each.
        p50_s, p99_s: latency of the finished ones.
        tokens_per_s: output tokens per second of the load.
        seconds: the load on the PARSE server.
        shown: the first faults, as text.
    """

    requests: int
    exact: int
    errors: int
    wrong_bytes: int
    leaks: int
    ends: dict[str, int]
    modes: dict[str, int]
    kinds: dict[str, int]
    p50_s: float
    p99_s: float
    tokens_per_s: float
    seconds: float
    shown: tuple[str, ...]

    @property
    def is_clean(self) -> bool:
        return not (self.errors or self.wrong_bytes or self.leaks)


def summarise(
    load: Sequence[SoakRequest],
    outcomes: Sequence[Outcome],
    found_leaks: Sequence[str],
    seconds: float,
) -> Report:
    """Count."""
    faults = [(outcome, fault) for outcome in outcomes for fault in outcome.faults]
    wrong = [fault for _, fault in faults if fault.startswith("wrong bytes")]
    finished = [outcome.seconds for outcome in outcomes if outcome.end == "finished"]
    p50, p99 = np.percentile(finished or [float("nan")], [50, 99])
    shown = [f"request {o.number} ({load[o.number].kind}): {fault}" for o, fault in faults]
    return Report(
        requests=len(outcomes),
        exact=sum(request.is_exact for request in load),
        errors=len(faults) - len(wrong),
        wrong_bytes=len(wrong),
        leaks=len(found_leaks),
        ends=dict(Counter(outcome.end for outcome in outcomes)),
        modes=dict(Counter(outcome.mode or "none" for outcome in outcomes)),
        kinds=dict(sorted(Counter(request.kind for request in load).items())),
        p50_s=round(float(p50), 3),
        p99_s=round(float(p99), 3),
        tokens_per_s=round(sum(o.output_tokens for o in outcomes) / seconds, 1),
        seconds=round(seconds, 1),
        shown=(*found_leaks, *shown)[:MAX_SHOWN],
    )


@dataclass(frozen=True)
class SoakSettings(Flags):
    """What the command line of ``sglang-parse soak`` can ask for."""

    pair: Path = option(DEMO_PAIR, "folder with target/, draft/", type=Path)
    requests: int = option(10_000, "default %(default)s", type=int)
    concurrency: int = option(64, "default %(default)s", type=int)
    seed: int = option(0, "of the load and of both servers", type=int)
    output: Path = option(Path("build/soak.json"), type=Path)
    overlap: str = option(
        "auto", f"PARSE's {flag('overlap')}; default %(default)s", choices=("auto", "on", "off")
    )


add_arguments = SoakSettings.add_arguments


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Exit code: 0 when nothing failed, leaked or differed; 1 otherwise. Raises: BenchError."""
    settings = SoakSettings.read(arguments)
    specs = _specs(settings)
    load = make_load(settings.requests, settings.seed, chat_renderer(settings.pair / "target"))
    # SGLang then asserts its slot accounting in every iteration, not only when idle.
    os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = "1"
    logs = settings.output.parent / "soak-logs"
    with make_progress(console) as progress, Pool(specs, logs) as pool:
        pool.start_all()
        report = _soak(load, pool, settings.concurrency, progress)
    write_json(settings.output, asdict(report))
    console.print(_table(report))
    for line in report.shown:
        console.print(line, markup=False)
    return 0 if report.is_clean else 1


def _specs(settings: SoakSettings) -> list[ServerSpec]:
    """The plain server, then PARSE. Raises: BenchError, when the pair is not there."""
    common = (
        *COMMON_FLAGS,
        *("--max-running-requests", str(settings.concurrency)),
        *("--random-seed", str(settings.seed)),
    )
    models = replace(demo_models(settings.pair), common=common)
    more = {
        # With overlap penalties come a step late in stock SGLang; under PARSE they do not.
        PLAIN: ("--disable-overlap-schedule",),
        PARSE: (*SHORT_ROUNDS, *parse_settings(overlap=settings.overlap)),
    }
    return [
        replace(spec, flags=(*spec.flags, *more[spec.name]))
        for spec in server_specs(models, tuple(more))
    ]


def _soak(load: Sequence[SoakRequest], pool: Pool, concurrency: int, progress: Progress) -> Report:
    task = progress.add_task("plain server, exact half", total=sum(r.is_exact for r in load))
    with pool.awake(PLAIN) as (plain,):
        expected = plain_answers(plain.url, load, concurrency, lambda: progress.advance(task))
    task = progress.add_task("PARSE", total=len(load))
    with pool.awake(PARSE) as (parse,):
        started = time.perf_counter()
        outcomes = drive(parse.url, load, expected, concurrency, lambda: progress.advance(task))
        seconds = time.perf_counter() - started
        found = leaks(parse.url)
    return summarise(load, outcomes, found, seconds)


def _table(report: Report) -> Table:
    title = f"{report.requests} requests, {report.exact} compared with the plain server"
    table = make_table(title, ("", ""))
    rows: dict[str, object] = {
        "errors": report.errors,
        "leaks": report.leaks,
        "wrong bytes": report.wrong_bytes,
        "latency p50 / p99": f"{report.p50_s:.2f} / {report.p99_s:.2f} s",
        "output tokens/s": report.tokens_per_s,
        **report.ends,
        **{f"mode {mode}": count for mode, count in report.modes.items()},
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table
