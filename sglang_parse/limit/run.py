"""``sglang-parse bench``: real shapes without weights, simulated acceptance, against the limit.

One server at a time, so that each may fill the device: the plain target, the draft alone, PARSE
that always drafts and accepts everything (the stage costs), PARSE at every simulated acceptance.
"""

from __future__ import annotations

import argparse

import psutil
import torch
from rich.console import Console

from sglang_parse.client.pool import Pool
from sglang_parse.client.program import ProgressLog, write_json
from sglang_parse.client.records import BenchError, BenchRun
from sglang_parse.client.servers import ServerSpec
from sglang_parse.limit.figures import (
    LimitFigures,
    VerifyTime,
    quotient,
    runs_of,
    speed_at,
    tokens_per_s,
)
from sglang_parse.limit.load import WARM_UP, Sender
from sglang_parse.limit.report import PLOT, RESULTS, limit_plot, report, show
from sglang_parse.limit.settings import LimitSettings, server_at


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Measures, writes results.json and bench.html after each server of which there are figures: a
    machine may be lent for a short while. Prints a table.

    Raises:
        BenchError: a server or a request failed, or this machine cannot run the benchmark.
    """
    settings, log = LimitSettings.read(arguments), ProgressLog(console)
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise BenchError(
            "--device is cuda and torch finds no GPU; use a machine with one, or try it with "
            "--device cpu --target tiny_target --draft tiny_draft"
        )
    gpus = [torch.cuda.mem_get_info(gpu)[1] for gpu in range(torch.cuda.device_count())]
    is_cpu = settings.device == "cpu"
    settings.check_memory(psutil.virtual_memory().total if is_cpu else sum(gpus))
    specs, measuring = settings.specs(), _Measuring(settings, log)
    for spec in specs:
        measuring.serve(spec)
        if measuring.has_costs:
            figures = measuring.figures()
            content = report(settings, specs, figures, log.seconds)
            write_json(settings.output / RESULTS, content, indent=1)
            limit_plot(settings, figures).write_html(settings.output / PLOT, include_plotlyjs=True)
    show(console, settings, figures)
    return 0


class _Measuring:
    """Serves one server after another and collects their results."""

    def __init__(self, settings: LimitSettings, log: ProgressLog) -> None:
        self.settings, self.log = settings, log
        self.runs: list[BenchRun] = []
        self.prefill_ms: dict[int, float] = {}

    def serve(self, spec: ServerSpec) -> None:
        """Starts a server, measures everything on it, stops it."""
        self.log(f"start {spec.name}")
        pool = Pool([spec], self.settings.output / "logs")
        with pool, pool.awake(spec.name) as (server,):
            self._send(Sender(server, spec, self.settings))

    def _send(self, sender: Sender) -> None:
        settings, name = self.settings, sender.endpoint.name
        for concurrency in settings.concurrencies:
            sender.send(WARM_UP, concurrency)
        if name == settings.cost_server:
            for rows in (settings.num_draft_rows, settings.num_rows):
                self.prefill_ms[rows] = sender.prefill_ms(rows)
        for concurrency in settings.concurrencies:
            found = [sender.send(run, concurrency) for run in range(settings.runs)]
            self.log(f"  {name}, {concurrency} at a time: {tokens_per_s(found):.1f} tokens/s")
            self.runs += found

    @property
    def _measured(self) -> set[str]:
        return {run.variant.server for run in self.runs}

    @property
    def has_costs(self) -> bool:
        """Whether everything was measured that all figures need."""
        return self.settings.cost_server in self._measured

    def figures(self) -> LimitFigures:
        """Figures of what was measured so far. Raises: BenchError, when something was not."""
        settings = self.settings
        speeds = tuple(
            speed_at(self.runs, fraction, concurrency, settings)
            for concurrency in settings.concurrencies
            for fraction in settings.fractions
            if server_at(fraction) in self._measured
        )
        fewest = settings.concurrencies[0]
        verify = VerifyTime(
            rows=settings.num_rows,
            draft_tokens=settings.draft_len,
            prefixes=settings.prefixes,
            question_tokens=settings.question_len,
            concurrency=fewest,
            ms=quotient(runs_of(self.runs, settings.cost_server, fewest), "verify_ms", "rounds"),
            prefill_ms=self.prefill_ms[settings.num_draft_rows],
            prefill_rows_ms=self.prefill_ms[settings.num_rows],
        )
        return LimitFigures(speeds, verify)
