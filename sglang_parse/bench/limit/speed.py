"""``sglang-parse bench``: real shapes without weights, simulated acceptance, against the limit.

One server at a time, so that each may fill the card: the plain target, the draft alone, PARSE at
its price (drafts always, keeps everything), PARSE at every accepted fraction.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import torch
from rich.console import Console

from sglang_parse.bench.demo.records import PLAIN, DemoError, Leg
from sglang_parse.bench.demo.servers import Server, ServerSpec, awake, servers
from sglang_parse.bench.kv import Held, summarise
from sglang_parse.bench.limit import limits
from sglang_parse.bench.limit.speed_figures import (
    Figures,
    MaskBuild,
    Memory,
    Pass,
    checks,
    median_of,
    speed,
    stage_ms,
    tokens_per_s,
)
from sglang_parse.bench.limit.speed_load import Sender
from sglang_parse.bench.limit.speed_memory import peak_bytes, total_bytes, used_bytes
from sglang_parse.bench.limit.speed_report import show, write
from sglang_parse.bench.limit.speed_settings import Settings, fraction_of

WARM_UP = -1
"""The run that is not timed: a server's first requests are its slowest."""


def main(arguments: argparse.Namespace) -> int:
    """Exit code: 0 when everything was measured, figures that miss their mark too; 1 otherwise."""
    try:
        run_bench(Settings.read(arguments), Console())
    except DemoError as error:
        print(f"sglang-parse bench: {error}", file=sys.stderr)
        return 1
    return 0


def run_bench(settings: Settings, console: Console) -> None:
    """Measure, write results.json and bench.html, print tables.

    Raises:
        DemoError: a server or a request failed, or this machine is not one to measure on.
    """
    started = time.monotonic()
    _check_machine(settings)
    settings.output.mkdir(parents=True, exist_ok=True)

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - started:5.0f} s  {text}", markup=False, highlight=False)

    specs = settings.specs()
    say(f"the {settings.device} by itself")
    card = _card(settings) if settings.limit else None
    masks = tuple(_mask(settings, concurrency) for concurrency in settings.concurrencies)
    torch.cuda.empty_cache()  # the servers may need all there is
    measured = Measured(settings, say)
    for spec in specs:
        measured.serve(spec)
    figures = measured.figures(masks, card)
    found = checks(figures) if settings.device == "cuda" else ()
    write(settings, specs, figures, found, time.monotonic() - started)
    show(console, settings, figures, found)


def _check_machine(settings: Settings) -> None:
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise DemoError(
            "--device is cuda and torch finds none; use a machine with a GPU, or, to see what this "
            "does, --device cpu --target tiny_target --draft tiny_draft"
        )
    settings.check_memory(total_bytes(settings.device))


def _card(settings: Settings) -> limits.Card:
    return limits.measure_card(settings.device, getattr(torch, settings.dtype))


def _mask(settings: Settings, concurrency: int) -> MaskBuild:
    layout = settings.layout()
    entries = concurrency * layout.num_rows * layout.kv_len
    ms = limits.mask_build_ms([layout] * concurrency, settings.device)
    return MaskBuild(concurrency, entries, ms)


@dataclass(slots=True)
class Measured:
    """What the servers brought back, one after the other."""

    settings: Settings
    say: Callable[[str], None]
    legs: list[Leg] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    held: dict[int, Held] = field(default_factory=dict)
    prefill_ms: dict[int, float] = field(default_factory=dict)

    def serve(self, spec: ServerSpec) -> None:
        """Start a server, measure all it is there for, end it."""
        self.say(f"start {spec.name}")
        used_before = used_bytes(self.settings.device)
        with servers([spec], self.settings.output / "logs") as running:
            server = running[spec.name]
            with awake(server):
                self._load(server)
                self.memory.append(_memory(self.settings.device, server, used_before))

    def _load(self, server: Server) -> None:
        sender = Sender(server, self.settings, fraction_of(server.name))
        concurrencies = self.settings.concurrencies
        for concurrency in concurrencies:
            sender.leg(WARM_UP, concurrency)
        if server.name == PLAIN:
            layout = self.settings.layout()
            for rows in (layout.num_draft_rows, layout.num_rows):
                self.prefill_ms[rows] = sender.prefill_ms(rows)
        for concurrency in concurrencies:
            legs = self._timed(sender, server.name, concurrency)
            rate = tokens_per_s(legs, server.name, concurrency)
            self.say(f"  {server.name}, {concurrency} at a time: {rate:.1f} tokens/s")
            self.legs += legs

    def _timed(self, sender: Sender, name: str, concurrency: int) -> list[Leg]:
        log = self.settings.kv_log()
        if name == self.settings.price:
            log.write_text("")
        legs = [sender.leg(run, concurrency) for run in range(self.settings.runs)]
        if name == self.settings.price:
            rate = tokens_per_s(legs, name, concurrency)
            self.held[concurrency] = summarise(log.read_text().splitlines(), round(rate, 1))
        return legs

    def figures(self, masks: tuple[MaskBuild, ...], card: limits.Card | None) -> Figures:
        """Raises: DemoError, when something was not measured."""
        settings = self.settings
        return Figures(
            speeds=tuple(
                speed(self.legs, fraction, concurrency, settings.price)
                for concurrency in settings.concurrencies
                for fraction in settings.fractions
            ),
            verification=self._pass(),
            masks=masks,
            memory=tuple(self.memory),
            held=self.held,
            card=card,
            bounds=self._bounds(card) if card else (),
        )

    def _pass(self) -> Pass:
        layout = self.settings.layout()
        price, fewest = self.settings.price, self.settings.concurrencies[0]
        return Pass(
            rows=layout.num_rows,
            draft_tokens=self.settings.output_len,
            prefixes=self.settings.prefixes,
            question_tokens=self.settings.question_len,
            concurrency=fewest,
            ms=median_of(self.legs, price, fewest, "verification_ms", "rounds"),
            prefill_ms=self.prefill_ms[layout.num_draft_rows],
            prefill_rows_ms=self.prefill_ms[layout.num_rows],
        )

    def _bounds(self, card: limits.Card) -> tuple[limits.Bound, ...]:
        settings = self.settings
        layout, size = settings.layout(), settings.item_bytes
        context = settings.input_len + settings.max_new_tokens / 2
        bounds = []
        for concurrency in settings.concurrencies:
            works = (
                limits.step_work(settings.draft, concurrency, context, size),
                limits.step_work(settings.target, concurrency, context, size),
                limits.pass_work(
                    settings.target, layout, concurrency, 1 + 2 * settings.prefixes, size
                ),
            )
            times = stage_ms(self.legs, concurrency, settings.price)
            bounds += [
                limits.bound(stage, concurrency, work, card, ms)
                for (stage, ms), work in zip(times.items(), works, strict=True)
            ]
        return tuple(bounds)


def _memory(device: str, server: Server, used_before: int) -> Memory:
    info = httpx.get(f"{server.url}/server_info", timeout=60).raise_for_status().json()
    usage = info["internal_states"][0]["memory_usage"]
    peak = peak_bytes(device, server, used_before)
    return Memory(server.name, peak / 2**30, usage["weight"], usage["kvcache"])
