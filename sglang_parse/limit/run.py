"""``sglang-parse bench``: real shapes without weights, simulated acceptance, against the limit.

One server at a time, so that each may fill the device: the plain target, the draft alone, PARSE
that always drafts and accepts everything (the stage costs), PARSE at every simulated acceptance.
"""

from __future__ import annotations

import argparse

import httpx
import torch
from rich.console import Console

from sglang_parse.client.pool import Pool
from sglang_parse.client.program import ProgressLog, write_json
from sglang_parse.client.records import BenchError, BenchRun
from sglang_parse.client.servers import Server, ServerSpec, awake
from sglang_parse.core.simulation import ENV_VAR as SIMULATE
from sglang_parse.limit import device
from sglang_parse.limit.figures import (
    LimitFigures,
    Memory,
    VerifyTime,
    make_goals,
    quotient,
    runs_of,
    speed_at,
    stage_forward_ms,
    tokens_per_s,
)
from sglang_parse.limit.load import Sender
from sglang_parse.limit.report import PLOT, RESULTS, limit_plot, report, show
from sglang_parse.limit.settings import LimitSettings

WARM_UP = -1
"""The run that is not timed: a server's first requests are its slowest."""


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Measures, writes results.json and bench.html, prints tables.

    Raises:
        BenchError: a server or a request failed, or this machine cannot run the benchmark.
    """
    settings, log = LimitSettings.read(arguments), ProgressLog(console)
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise BenchError(
            "--device is cuda and torch finds no GPU; use a machine with one, or try it with "
            "--device cpu --target tiny_target --draft tiny_draft"
        )
    settings.check_memory(device.total_bytes(settings.device))
    specs = settings.specs()
    card = None
    if settings.limit:
        log(f"measure the {settings.device}")
        card = device.measure_card(settings.device, getattr(torch, settings.dtype))
        torch.cuda.empty_cache()  # the servers may need all of it
    measuring = _Measuring(settings, log)
    for spec in specs:
        measuring.serve(spec)
    figures = measuring.figures(card)
    goals = make_goals(figures) if settings.device == "cuda" else ()
    content = report(settings, specs, figures, goals, log.seconds)
    write_json(settings.output / RESULTS, content, indent=1)
    limit_plot(settings, figures).write_html(settings.output / PLOT, include_plotlyjs=True)
    show(console, settings, figures, goals)
    return 0


class _Measuring:
    """Serves one server after another and collects their results."""

    def __init__(self, settings: LimitSettings, log: ProgressLog) -> None:
        self.settings, self.log = settings, log
        self.runs: list[BenchRun] = []
        self.memory: list[Memory] = []
        self.prefill_ms: dict[int, float] = {}

    def serve(self, spec: ServerSpec) -> None:
        """Starts a server, measures everything on it, stops it."""
        self.log(f"start {spec.name}")
        used_before = device.used_bytes(self.settings.device)
        simulated = dict(spec.environment).get(SIMULATE)
        with Pool([spec], self.settings.output / "logs") as pool:
            server = pool.server(spec)
            with awake(server):
                fraction = None if simulated is None else float(simulated)
                self._send(Sender(server, self.settings, fraction))
                used = device.used_bytes(self.settings.device, server) - used_before
                self.memory.append(_memory(server, used))

    def _send(self, sender: Sender) -> None:
        settings, name = self.settings, sender.endpoint.name
        for concurrency in settings.concurrencies:
            sender.send(WARM_UP, concurrency)
        if name == settings.cost_server:
            layout = settings.layout()
            for rows in (layout.num_draft_rows, layout.num_rows):
                self.prefill_ms[rows] = sender.prefill_ms(rows)
        for concurrency in settings.concurrencies:
            found = [sender.send(run, concurrency) for run in range(settings.runs)]
            self.log(f"  {name}, {concurrency} at a time: {tokens_per_s(found):.1f} tokens/s")
            self.runs += found

    def figures(self, card: device.Card | None) -> LimitFigures:
        """Raises: BenchError, when something was not measured."""
        settings = self.settings
        speeds = tuple(
            speed_at(self.runs, fraction, concurrency, settings)
            for concurrency in settings.concurrencies
            for fraction in settings.fractions
        )
        bounds = self._bounds(card) if card else ()
        return LimitFigures(speeds, self._verify_time(), tuple(self.memory), card, bounds)

    def _verify_time(self) -> VerifyTime:
        settings, layout = self.settings, self.settings.layout()
        fewest = settings.concurrencies[0]
        return VerifyTime(
            rows=layout.num_rows,
            draft_tokens=settings.draft_len,
            prefixes=settings.prefixes,
            question_tokens=settings.question_len,
            concurrency=fewest,
            ms=quotient(runs_of(self.runs, settings.cost_server, fewest), "verify_ms", "rounds"),
            prefill_ms=self.prefill_ms[layout.num_draft_rows],
            prefill_rows_ms=self.prefill_ms[layout.num_rows],
        )

    def _bounds(self, card: device.Card) -> tuple[device.Bound, ...]:
        settings, layout = self.settings, self.settings.layout()
        context, size = settings.input_len + settings.max_new_tokens / 2, settings.item_bytes
        num_logits = layout.num_draft_rows + settings.prefixes
        found: list[device.Bound] = []
        for concurrency in settings.concurrencies:
            works = (
                device.step_work(settings.draft, concurrency, context, size),
                device.step_work(settings.target, concurrency, context, size),
                device.verify_work(settings.target, layout, concurrency, num_logits, size),
            )
            times = stage_forward_ms(self.runs, concurrency, settings)
            found += [
                device.bound(stage, concurrency, work, card, ms)
                for (stage, ms), work in zip(times.items(), works, strict=True)
            ]
        return tuple(found)


def _memory(server: Server, used: int) -> Memory:
    info = httpx.get(f"{server.url}/server_info", timeout=60).raise_for_status().json()
    usage = info["internal_states"][0]["memory_usage"]
    return Memory(server.name, used / 2**30, usage["weight"], usage["kvcache"])
