"""``sglang-parse roofline``: tables of forwards, of speedups by acceptance, and of what is lost."""

from __future__ import annotations

import argparse

from rich.console import Console

from sglang_parse.client.sections import Grid, Sections
from sglang_parse.client.tables import show
from sglang_parse.core.block import ONE_TOKEN, USUAL_BLOCK
from sglang_parse.roofline.forwards import BLOCKS, DRAFT_LENGTHS, Forward, Workload
from sglang_parse.roofline.rounds import LOSSES, THIS, best_rate
from sglang_parse.roofline.settings import RooflineSettings

WAYS = {"one token": (ONE_TOKEN,), f"blocks of {USUAL_BLOCK}": BLOCKS, "texts": ()}
"""How drafts are written -> the kinds of the draft model's forwards."""
HEADS = ("head of the draft", "head of the target, in pieces", "one graph, or stock EAGLE3")
MTP = "MTP layer, one graph"


EVERY = (0, 32)
"""A refusal every so many tokens; 0: none."""


def run(arguments: argparse.Namespace, console: Console) -> int:
    settings = RooflineSettings.read(arguments)
    console.width = max(console.width, 120)  # narrower lines break: figures would be cut off
    show(console, {**costs(settings), **speedups(settings), **losses(settings)})
    return 0


def costs(settings: RooflineSettings) -> Sections:
    """Forwards at the lowest concurrency, and their times at each."""
    counts = settings.concurrencies
    headings = ("", "rows", "GB", "GFLOP", "kernels", "most time")
    title = f"Forwards, {counts[0]} at a time; last their times at more"
    found = [_forwards(Workload(settings, count)) for count in counts]
    rows = []
    for name, one in found[0].items():
        figures = (f"{one.rows}", f"{sum(one.num_bytes) / 1e9:.1f}", f"{one.flops / 1e9:,.0f}")
        ms = [f"{forwards[name].ms:.2f}" for forwards in found]
        rows.append([name, *figures, f"{one.kernels}", one.bound, *ms])
    return {title: [Grid([*headings, *map("ms at {}".format, counts)], rows)]}


def _forwards(load: Workload) -> dict[str, Forward]:
    target = load.settings.target
    return {
        "target step": load.forward(target, 1),
        "target prefill": load.prefill(target),
        "target verify": load.verify(DRAFT_LENGTHS[-1]),
        "draft step": load.draft_forward(ONE_TOKEN),
        **{f"draft block {one.masks.value}": load.draft_forward(one) for one in BLOCKS},
    }


def speedups(settings: RooflineSettings) -> Sections:
    """Of PARSE by its drafts, with their best length in parentheses, and of stock EAGLE3."""
    headings = ("at a time", "plain tokens/s", "accepted", *WAYS, *HEADS, MTP)
    heads = f"heads and MTP layers at {settings.accept_length:g} tokens per forward"
    rows = []
    for load in (Workload(settings, count) for count in settings.concurrencies):
        plain, tokens = load.plain(), settings.accept_length
        rate = 1e3 * load.num_reqs * settings.output_len / plain
        alone = [load.eagle3(tokens, in_pieces=True), load.eagle3(tokens), load.mtp(tokens)]
        for acceptance in settings.acceptances:
            ways = [*((kinds, 0.0) for kinds in WAYS.values()), ((), tokens)]
            found = [load.parse(acceptance, *way) for way in ways]
            cells = [f"{plain / ms:.1f}x ({length})" for ms, length in found]
            cells += [f"{plain / ms:.1f}x" for ms in alone]
            rows.append([f"{load.num_reqs}", f"{rate:,.0f}", f"{acceptance:g}", *cells])
    return {f"Speedup by acceptance of draft tokens; {heads}": [Grid(headings, rows)]}


def losses(settings: RooflineSettings) -> Sections:
    """Simulated rounds in blocks: over plain decoding and stock EAGLE3, as they are and without one
    loss each."""
    loads = [Workload(settings, count) for count in settings.concurrencies]
    cells: dict[str, list[str]] = {"as it is": [], **{name: [] for name in LOSSES}}
    for load in loads:
        number = 1e3 * load.num_reqs * settings.output_len
        plain, eagle = number / load.plain(), number / load.eagle3(settings.accept_length)
        for every in EVERY:
            rate, length = best_rate(load, THIS, every)
            cells["as it is"].append(f"{rate / plain:.1f}x, {rate / eagle:.1f}x")
            for name, build in LOSSES.items():
                cells[name].append(f"{best_rate(load, build, every, [length])[0] / rate - 1:+.0%}")
    texts = ("all accepted", *(f"every {every}" for every in EVERY[1:]))
    headings = ["without", *(f"{text}, {load.num_reqs}" for load in loads for text in texts)]
    rows = [[name, *row] for name, row in cells.items()]
    title = f"Losses in rounds with blocks of {USUAL_BLOCK}: over plain, over stock EAGLE3"
    return {title: [Grid(headings, rows)]}
