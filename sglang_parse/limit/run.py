"""``sglang-parse bench``: real shapes without weights, simulated acceptance, beside stock SGLang.

As many servers as fit into the device's memory start together. Then each is measured while the
others are suspended: one that starts would disturb it.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence

import psutil
import torch
from rich.console import Console

from sglang_parse.client.pool import Pool
from sglang_parse.client.program import ProgressLog, write_json
from sglang_parse.client.records import BenchError, BenchRun
from sglang_parse.client.servers import ServerSpec
from sglang_parse.limit.figures import content, speeds, table
from sglang_parse.limit.load import WARM_UP, Sender
from sglang_parse.limit.settings import LimitSettings


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
                    yield spec.name, _send(Sender(server, spec, settings), settings, log)
            except BenchError as error:
                yield spec.name, error


def _send(sender: Sender, settings: LimitSettings, log: ProgressLog) -> list[BenchRun]:
    found: list[BenchRun] = []
    for concurrency in settings.concurrencies:
        sender.send(WARM_UP, concurrency)
        timed = [sender.send(run, concurrency) for run in range(settings.runs)]
        rates = ", ".join(f"{run.tokens_per_s:.1f}" for run in timed)
        log(f"  {sender.endpoint.name}, {concurrency} at a time: {rates} tokens/s")
        found += timed
    return found
