"""``sglang-parse bench``: real shapes without weights, simulated acceptance, beside stock SGLang.

As many servers as fit into the device's memory start together. Then each is measured while the
others are suspended: one that starts would disturb it. Requests are random tokens, answers of a
fixed length: without trained weights there is no text, whose chunks ``bench_serving`` could time.
"""

from __future__ import annotations

import argparse
import contextlib
import random
from collections.abc import Iterator, Sequence

import psutil
import torch
from rich.console import Console

from sglang_parse.client.ask import LONG_LIMIT_S, Asking, ask
from sglang_parse.client.pool import Pool
from sglang_parse.client.program import ProgressLog, write_json
from sglang_parse.client.records import BenchError, BenchRun, Item, has_parse
from sglang_parse.client.servers import Endpoint, ServerSpec
from sglang_parse.core.policy.constants import DEFAULTS
from sglang_parse.core.simulation import ENV_VAR as SIMULATE
from sglang_parse.limit.figures import content, speeds, table
from sglang_parse.limit.settings import LimitSettings

WARM_UP = -1
"""The run that is not timed: a server's first requests are its slowest, and the adaptive policy
decides after a window of drafts."""
MIN_REQUESTS = 2


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Measures and writes results.json after each server: a machine may be lent for a short while,
    and a server that fails leaves the others. Prints a table. Returns 1 if one failed.
    """
    settings, log = LimitSettings.read(arguments), ProgressLog(console)
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise BenchError(
            "--device is cuda and torch finds no GPU; use a machine with one, or try it with "
            "--device cpu --target tiny_target --draft tiny_draft"
        )
    gpus = [torch.cuda.mem_get_info(gpu)[1] for gpu in range(torch.cuda.device_count())]
    is_cpu = settings.device == "cpu"
    at_once = settings.servers_at_once(psutil.virtual_memory().total if is_cpu else sum(gpus))
    results = settings.output / "results.json"
    specs, runs, failed = settings.specs(), list[BenchRun](), dict[str, str]()
    for start in range(0, len(specs), at_once):
        for name, outcome in _measure(specs[start : start + at_once], settings, log):
            if isinstance(outcome, BenchError):
                failed[name] = str(outcome)
                log(f"{name} failed: {outcome}")
            else:
                runs += outcome
            found = content(settings, specs, speeds(runs), failed, log.seconds)
            write_json(results, found)
    console.print(table(speeds(runs)), str(results), sep="\n", highlight=False)
    return 1 if failed else 0


def _measure(
    specs: Sequence[ServerSpec], settings: LimitSettings, log: ProgressLog
) -> Iterator[tuple[str, list[BenchRun] | BenchError]]:
    """Starts servers together; yields each one's name with its runs, or why there are none."""
    log(f"start {', '.join(spec.name for spec in specs)}")
    with Pool(specs, settings.output / "logs") as pool:
        with contextlib.suppress(BenchError):  # of the one that failed, when its turn comes
            pool.start_all()
        for spec in specs:
            try:
                with pool.awake(spec.name) as (server,):
                    yield spec.name, _send(server, spec, settings, log)
            except BenchError as error:
                yield spec.name, error


def _send(
    server: Endpoint, spec: ServerSpec, settings: LimitSettings, log: ProgressLog
) -> list[BenchRun]:
    """All runs of one server: random prompts, which differ from request to request."""
    numbers, words = random.Random(0), range(3, settings.target.vocab_size)
    asking = Asking(max_tokens=settings.max_new_tokens, limit_s=LONG_LIMIT_S)
    least = 1 + DEFAULTS.window if settings.drafting == "auto" and has_parse(server.name) else 1
    found: list[BenchRun] = []
    for concurrency in settings.concurrencies:
        for run in range(WARM_UP, settings.runs):
            count = max(least if run == WARM_UP else MIN_REQUESTS, concurrency)
            prompts = [numbers.choices(words, k=settings.input_len) for _ in range(count)]
            requests = [{"input_ids": prompt, "ignore_eos": True} for prompt in prompts]
            items = [Item("", "", None, request=request) for request in requests]
            done = ask(server, items, range(count), None, run, concurrency, asking=asking)
            _check(done, settings, is_simulated=SIMULATE in dict(spec.environment))
            found += [done] if run != WARM_UP else []
        rates = ", ".join(f"{run.tokens_per_s:.1f}" for run in found[-settings.runs :])
        log(f"  {server.name}, {concurrency} at a time: {rates} tokens/s")
    return found


def _check(done: BenchRun, settings: LimitSettings, *, is_simulated: bool) -> None:
    for answer in done.answers:
        if answer.output_tokens != settings.max_new_tokens:
            raise BenchError(f"{done.variant.server} generated {answer.output_tokens} tokens")
        if is_simulated and "simulated" not in answer.parse:
            raise BenchError(
                f"{done.variant.server} should simulate acceptance, its meta_info['parse'] is "
                f"{answer.parse!r}"
            )
