"""What the demo prints: one table of figures."""

from __future__ import annotations

from rich.table import Table

from sglang_parse.client.figures import STAGES
from sglang_parse.client.records import TITLES
from sglang_parse.client.tables import make_table
from sglang_parse.demo.figures import DemoFigures, ServerFigures, Speed


def figures_table(figures: DemoFigures, concurrency: int) -> Table:
    """Servers as columns, figures as rows."""
    headings = ("", *(TITLES[name] for name in figures.servers))
    table = make_table("PARSE and what it is made of, side by side", headings)
    columns = [_column(server, figures) for server in figures.servers.values()]
    for label, *cells in zip(_labels(concurrency), *columns, strict=True):
        table.add_row(label, *cells)
    return table


def _labels(concurrency: int) -> list[str]:
    many = f"{concurrency} requests"
    return [
        "exact answers",
        "output tokens/s, 1 request",
        "  ratio to plain",
        f"output tokens/s, {many}",
        "  ratio to plain",
        "output tokens from the draft",
        "verification passes per request",
        *(f"ms per request: {stage}" for stage in STAGES),
        "limit 1 / (r + v + 1 - a)",
        "  share of it reached",
    ]


def _column(server: ServerFigures, figures: DemoFigures) -> list[str]:
    cells = [f"{server.accuracy:.1%} of {server.problems}"]
    cells += [*_speed_cells(server.one), *_speed_cells(server.concurrent)]
    stages = server.stages_one
    if stages is None:
        return cells + ["-"] * (4 + len(STAGES))
    return [
        *cells,
        f"{stages.draft_share:.1%}",
        f"{stages.passes_per_request:.2f}",
        *(f"{stages.ms_per_request[stage]:.0f}" for stage in STAGES),
        f"{figures.limit.limit:.2f}x",
        f"{figures.limit.share_reached:.0%}",
    ]


def _speed_cells(speed: Speed) -> list[str]:
    return [f"{speed.tokens_per_s:.0f}", f"{speed.ratio:.2f}x"]
