"""``sglang-parse bench``: real shapes without weights, simulated acceptance, against the limit.

One server at a time, so that each may fill the card: the plain target, the draft alone, PARSE at
its price (drafts always, keeps everything), PARSE at every accepted fraction.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

import httpx
import torch
from rich.console import Console

from sglang_parse.client.figures import quotient, runs_of, tokens_per_s
from sglang_parse.client.kv_log import Held
from sglang_parse.client.pool import Pool
from sglang_parse.client.program import Teller, write_json
from sglang_parse.client.records import BenchError, BenchRun
from sglang_parse.client.servers import Server, ServerSpec, awake
from sglang_parse.limit import bounds
from sglang_parse.limit.figures import (
    LimitFigures,
    MaskBuild,
    Memory,
    Pass,
    make_goals,
    run_ms,
    speed_at,
)
from sglang_parse.limit.load import Sender
from sglang_parse.limit.memory import peak_bytes, total_bytes, used_bytes
from sglang_parse.limit.report import PLOT, RESULTS, limit_plot, report, show
from sglang_parse.limit.settings import LimitSettings, fraction_of

WARM_UP = -1
"""The run that is not timed: a server's first requests are its slowest."""


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Measure, write results.json and bench.html, print tables.

    Raises:
        BenchError: a server or a request failed, or this machine is not one to measure on.
    """
    settings, say = LimitSettings.read(arguments), Teller(console)
    _check_machine(settings)
    settings.output.mkdir(parents=True, exist_ok=True)
    specs = settings.specs()
    say(f"the {settings.device} by itself")
    card = _card(settings) if settings.limit else None
    masks = tuple(_mask(settings, concurrency) for concurrency in settings.concurrencies)
    torch.cuda.empty_cache()  # the servers may need all there is
    measured = _Measured(settings, say)
    for spec in specs:
        measured.serve(spec)
    figures = measured.figures(masks, card)
    found = make_goals(figures) if settings.device == "cuda" else ()
    content = report(settings, specs, figures, found, say.seconds)
    write_json(settings.output / RESULTS, content, indent=1)
    limit_plot(settings, figures).write_html(settings.output / PLOT, include_plotlyjs=True)
    show(console, settings, figures, found)
    return 0


def _check_machine(settings: LimitSettings) -> None:
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise BenchError(
            "--device is cuda and torch finds none; use a machine with a GPU, or, to see what this "
            "does, --device cpu --target tiny_target --draft tiny_draft"
        )
    settings.check_memory(total_bytes(settings.device))


def _card(settings: LimitSettings) -> bounds.Card:
    return bounds.measure_card(settings.device, getattr(torch, settings.dtype))


def _mask(settings: LimitSettings, concurrency: int) -> MaskBuild:
    layout = settings.layout()
    entries = concurrency * layout.num_rows * layout.kv_len
    layouts = [layout] * concurrency
    ms = bounds.mask_build_ms(layouts, settings.device)
    pack_ms = None
    if settings.attention_backend == "flashinfer":
        pack_ms = bounds.mask_pack_ms(layouts, settings.device)
    return MaskBuild(concurrency, entries, ms, pack_ms)


@dataclass(slots=True)
class _Measured:
    """What the servers brought back, one after the other."""

    settings: LimitSettings
    say: Teller
    legs: list[BenchRun] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    held: dict[int, Held] = field(default_factory=dict)
    prefill_ms: dict[int, float] = field(default_factory=dict)

    def serve(self, spec: ServerSpec) -> None:
        """Start a server, measure all it is there for, end it."""
        self.say(f"start {spec.name}")
        used_before = used_bytes(self.settings.device)
        with Pool([spec], self.settings.output / "logs") as pool:
            server = pool.server(spec)
            with awake(server):
                self._load(server)
                self.memory.append(_memory(self.settings.device, server, used_before))

    def _load(self, server: Server) -> None:
        sender = Sender(server, self.settings, fraction_of(server.name))
        concurrencies = self.settings.concurrencies
        for concurrency in concurrencies:
            sender.leg(WARM_UP, concurrency)
        if server.name == self.settings.price:
            layout = self.settings.layout()
            for rows in (layout.num_draft_rows, layout.num_rows):
                self.prefill_ms[rows] = sender.prefill_ms(rows)
        for concurrency in concurrencies:
            legs = self._timed(sender, server.name, concurrency)
            rate = tokens_per_s(legs)
            self.say(f"  {server.name}, {concurrency} at a time: {rate:.1f} tokens/s")
            self.legs += legs

    def _timed(self, sender: Sender, name: str, concurrency: int) -> list[BenchRun]:
        log = self.settings.kv_log()
        if name == self.settings.price:
            log.write_text("")
        legs = [sender.leg(run, concurrency) for run in range(self.settings.runs)]
        if name == self.settings.price:
            lines = log.read_text().splitlines()
            self.held[concurrency] = Held.of(lines, round(tokens_per_s(legs), 1))
        return legs

    def figures(self, masks: tuple[MaskBuild, ...], card: bounds.Card | None) -> LimitFigures:
        """Raises: BenchError, when something was not measured."""
        settings = self.settings
        return LimitFigures(
            speeds=tuple(
                speed_at(self.legs, fraction, concurrency, settings)
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
            draft_tokens=self.settings.draft_len,
            prefixes=self.settings.prefixes,
            question_tokens=self.settings.question_len,
            concurrency=fewest,
            ms=quotient(runs_of(self.legs, price, fewest), "verify_ms", "rounds"),
            prefill_ms=self.prefill_ms[layout.num_draft_rows],
            prefill_rows_ms=self.prefill_ms[layout.num_rows],
        )

    def _bounds(self, card: bounds.Card) -> tuple[bounds.Bound, ...]:
        settings = self.settings
        layout, size = settings.layout(), settings.item_bytes
        context = settings.input_len + settings.max_new_tokens / 2
        found: list[bounds.Bound] = []
        for concurrency in settings.concurrencies:
            works = (
                bounds.step_work(settings.draft, concurrency, context, size),
                bounds.step_work(settings.target, concurrency, context, size),
                bounds.pass_work(
                    settings.target,
                    layout,
                    concurrency,
                    layout.num_draft_rows + settings.prefixes,
                    size,
                ),
            )
            times = run_ms(self.legs, concurrency, settings)
            found += [
                bounds.bound(stage, concurrency, work, card, ms)
                for (stage, ms), work in zip(times.items(), works, strict=True)
            ]
        return tuple(found)


def _memory(device: str, server: Server, used_before: int) -> Memory:
    info = httpx.get(f"{server.url}/server_info", timeout=60).raise_for_status().json()
    usage = info["internal_states"][0]["memory_usage"]
    peak = peak_bytes(device, server, used_before)
    return Memory(server.name, peak / 2**30, usage["weight"], usage["kvcache"])
