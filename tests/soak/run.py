"""`make soak`: many mixed requests at once; none may fail, leak or change an exact answer.

The exact half of the load goes to a plain server first. Then the whole load goes to a PARSE server
that checks its KV slots in every iteration.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from transformers import AutoTokenizer

from sglang_parse.cli import end_on_sigterm
from sglang_parse.client.pool import Pool
from sglang_parse.client.program import run_program, write_json
from sglang_parse.client.records import PARSE, PLAIN
from sglang_parse.client.servers import COMMON_FLAGS, ServerSpec, free_ports
from sglang_parse.client.tables import make_progress
from sglang_parse.client.targets import parse_settings, server_specs
from sglang_parse.core.config import flag
from soak.drive import Outcome, drive, leaks_of, plain_answers
from soak.endpoint import dying_endpoint
from soak.load import Message, SoakRequest, make_request
from support.demo_pair import DEMO
from support.one_chain import Problem, held_out_problems
from support.pair_models import pair_models

NUM_PROBLEMS = 2_000
MAX_SHOWN = 10


def soak_settings(endpoint_port: int) -> tuple[str, ...]:
    """Drafts of every source. Short ones: more rounds and more phase changes per second."""
    return parse_settings(
        drafting="auto",
        draft_tokens=24,
        draft_chunk=8,
        reuse_answers="200:shared",
        draft_url=f"http://127.0.0.1:{endpoint_port}",
        draft_timeout=0.5,
    )


def make_load(
    count: int, problems: Sequence[Problem], seed: int, target: Path
) -> list[SoakRequest]:
    """Makes ``count`` requests on these problems, rendered with the target's chat template."""
    tokenizer = AutoTokenizer.from_pretrained(target)

    def render(messages: Sequence[Message]) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    return [make_request(number, seed, problems, render) for number in range(count)]


@dataclass(frozen=True, slots=True)
class Report:
    """The soak's result: what must be zero, then requests by outcome and by ``meta_info`` mode, and
    draft tokens by source."""

    requests: int
    exact: int
    errors: int
    wrong_bytes: int
    leaks: int
    ends: dict[str, int]
    modes: dict[str, int]
    drafted: dict[str, int]
    p50_s: float
    p99_s: float
    tokens_per_s: float
    seconds: float
    first_faults: tuple[str, ...]

    @property
    def is_clean(self) -> bool:
        return not (self.errors or self.wrong_bytes or self.leaks)


def summarise(
    load: Sequence[SoakRequest], outcomes: Sequence[Outcome], leaks: Sequence[str], seconds: float
) -> Report:
    faults = [(outcome, fault) for outcome in outcomes for fault in outcome.faults]
    num_wrong = sum(fault.startswith("wrong bytes") for _, fault in faults)
    finished = [outcome.seconds for outcome in outcomes if outcome.end == "finished"]
    p50, p99 = np.percentile(finished or [float("nan")], [50, 99]).round(3).tolist()
    texts = [f"request {o.number} ({load[o.number].kind}): {fault}" for o, fault in faults]
    return Report(
        requests=len(outcomes),
        exact=sum(request.is_exact for request in load),
        errors=len(faults) - num_wrong,
        wrong_bytes=num_wrong,
        leaks=len(leaks),
        ends=dict(Counter(outcome.end for outcome in outcomes)),
        modes=dict(Counter(outcome.mode or "none" for outcome in outcomes)),
        drafted=dict(sum((Counter(outcome.drafted) for outcome in outcomes), Counter())),
        p50_s=p50,
        p99_s=p99,
        tokens_per_s=round(sum(o.output_tokens for o in outcomes) / seconds, 1),
        seconds=round(seconds, 1),
        first_faults=(*leaks, *texts)[:MAX_SHOWN],
    )


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Returns 0 when nothing failed, leaked or differed, else 1. Raises: BenchError."""
    problems = held_out_problems(NUM_PROBLEMS, seed=arguments.seed)
    load = make_load(arguments.requests, problems, arguments.seed, arguments.pair / "target")
    (endpoint_port,) = free_ports(1)
    # SGLang then asserts its slot accounting in every iteration, not only when idle.
    os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = "1"
    logs = arguments.output.parent / "soak-logs"
    specs = _specs(arguments, endpoint_port)
    with make_progress(console) as progress, Pool(specs, logs) as pool:
        pool.start_all()
        bar = partial(progress.advance, progress.add_task("exact half", total=len(load[::2])))
        with pool.awake(PLAIN) as (plain,):
            expected = plain_answers(plain.url, load, arguments.concurrency, bar)
        bar = partial(progress.advance, progress.add_task("PARSE", total=len(load)))
        with pool.awake(PARSE) as (parse,), dying_endpoint(endpoint_port, problems):
            started = time.perf_counter()
            outcomes = drive(parse.url, load, expected, arguments.concurrency, bar)
            seconds = time.perf_counter() - started
            report = summarise(load, outcomes, leaks_of(parse.url), seconds)
    write_json(arguments.output, asdict(report))
    console.print_json(data=asdict(report))
    return 0 if report.is_clean else 1


def _specs(arguments: argparse.Namespace, endpoint_port: int) -> list[ServerSpec]:
    """The plain server, then PARSE. Raises: BenchError, where the pair is missing."""
    running = ("--max-running-requests", str(arguments.concurrency))
    common = (*COMMON_FLAGS, *running, "--random-seed", str(arguments.seed))
    models = replace(pair_models(arguments.pair), flags=common)
    more = {
        # Stock SGLang's overlap schedule applies penalties one step late; PARSE's does not.
        PLAIN: ("--disable-overlap-schedule",),
        PARSE: (*soak_settings(endpoint_port), *parse_settings(overlap=arguments.overlap)),
    }
    return [
        replace(spec, flags=(*spec.flags, *more[spec.name]))
        for spec in server_specs(models, tuple(more))
    ]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    add = parser.add_argument
    add("--pair", type=Path, default=DEMO, help="folder with target/, draft/, question.json")
    add("--requests", type=int, default=10_000, help="default %(default)s")
    add("--concurrency", type=int, default=64, help="default %(default)s")
    add("--seed", type=int, default=0, help="of the load and of both servers")
    add("--output", type=Path, default=Path("build/soak.json"), help="default %(default)s")
    choices = ("auto", "on", "off")
    add("--overlap", choices=choices, default="auto", help=f"PARSE's {flag('overlap')}")
    return parser


if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(run_program("soak", run, make_parser().parse_args()))
