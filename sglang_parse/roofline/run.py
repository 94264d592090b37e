"""``sglang-parse roofline``: prints what forwards cost, and speedups by acceptance."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from sglang_parse.client.tables import make_table
from sglang_parse.core.block import ONE_TOKEN, USUAL_BLOCK, layouts_for
from sglang_parse.roofline.cost import DRAFT_LENGTHS, Forward, Workload
from sglang_parse.roofline.settings import RooflineSettings

BLOCKS = layouts_for(USUAL_BLOCK, allow_one_token=False)
WAYS = {"one token": (ONE_TOKEN,), f"blocks of {USUAL_BLOCK}": BLOCKS, "texts": ()}
"""How drafts are written -> the layouts of the draft model's forwards."""
HEADS = ("head of the draft", "head of the target, in pieces", "one graph, or stock EAGLE3")
MIN_WIDTH = 120
"""In a narrower terminal the tables' lines break; else figures would be cut off."""


def run(arguments: argparse.Namespace, console: Console) -> int:
    settings = RooflineSettings.read(arguments)
    console.width = max(console.width, MIN_WIDTH)
    console.print(costs(settings), speedups(settings))
    return 0


def costs(settings: RooflineSettings) -> Table:
    """Forwards at the lowest concurrency, and their times at each."""
    loads = [Workload(settings, count) for count in settings.concurrencies]
    headings = ("", "rows", "GB", "GFLOP", "kernels", "most time")
    times = [f"ms at {load.num_reqs}" for load in loads]
    title = f"Forwards, {loads[0].num_reqs} at a time; last their times at more"
    table = make_table(title, [*headings, *times])
    found = [_forwards(load) for load in loads]
    for name, one in found[0].items():
        figures = (f"{one.rows}", f"{sum(one.num_bytes) / 1e9:.1f}", f"{one.flops / 1e9:,.0f}")
        ms = [f"{forwards[name].ms:.2f}" for forwards in found]
        table.add_row(name, *figures, f"{one.kernels}", one.bound, *ms)
    return table


def _forwards(load: Workload) -> dict[str, Forward]:
    target = load.settings.target
    return {
        "target step": load.forward(target, 1),
        "target prefill": load.prefill(target),
        "target verify": load.verify(DRAFT_LENGTHS[-1]),
        "draft step": load.draft_forward(ONE_TOKEN),
        **{f"draft block {one.masks.value}": load.draft_forward(one) for one in BLOCKS},
    }


def speedups(settings: RooflineSettings) -> Table:
    """Of PARSE by its drafts, with their best length in parentheses, and of stock EAGLE3."""
    headings = ("at a time", "plain tokens/s", "accepted", *WAYS, *HEADS)
    heads = f"EAGLE-3 heads at {settings.accept_length:g} tokens per forward"
    table = make_table(f"Speedup by acceptance of draft tokens; {heads}", headings)
    for load in (Workload(settings, count) for count in settings.concurrencies):
        plain, tokens = load.plain(), settings.accept_length
        rate = 1e3 * load.num_reqs * settings.output_len / plain
        alone = [load.eagle3(tokens, in_pieces=True), load.eagle3(tokens)]
        for acceptance in settings.acceptances:
            found = [load.parse(acceptance, layouts) for layouts in WAYS.values()]
            found.append(load.parse(acceptance, (), tokens))
            cells = [f"{plain / ms:.1f}x ({length})" for ms, length in found]
            cells += [f"{plain / ms:.1f}x" for ms in alone]
            table.add_row(f"{load.num_reqs}", f"{rate:,.0f}", f"{acceptance:g}", *cells)
    return table
