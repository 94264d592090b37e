"""What the demo prints: one table of figures, and one answer with its verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from sglang_parse.bench.demo.figures import DemoFigures, ServerFigures, Speed
from sglang_parse.bench.harness.figures import STAGES
from sglang_parse.bench.harness.records import TITLES
from sglang_parse.bench.harness.tables import make_table

Decode = Callable[[Sequence[int]], str]


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


@dataclass(frozen=True, slots=True)
class Piece:
    """One line of the annotated answer.

    Attributes:
        author: ``draft`` or ``target``.
        verdict: the target's answer for the prefix that ends here, None without one.
        fate: ``kept``, ``rejected`` (the cut is before it) or ``dropped`` (behind a rejected one).
    """

    author: str
    text: str
    verdict: float | None
    fate: str


def pieces_of_answer(text: str, trace: Sequence[dict[str, Any]], decode: Decode) -> list[Piece]:
    """The answer in reading order, with what was rejected put in where it was written.

    What the target wrote is what remains of the answer between the kept runs of the rounds. A
    draft of which nothing was kept starts where the demo's settings let drafting resume: at the
    first line that begins after the cut before it.
    """
    pieces: list[Piece] = []
    place = 0
    for number, record in enumerate(trace):
        kept = decode(record["draft_token_ids"][: record["cut"]])
        if kept:
            start = text.find(kept, place)
        else:
            start = (text.find("\n", place) + 1 or len(text)) if number else place
        if start > place:
            pieces.append(Piece("target", text[place:start], None, "kept"))
        pieces += _draft_pieces(record, decode)
        place = max(start, place) + len(kept)
    if place < len(text):
        pieces.append(Piece("target", text[place:], None, "kept"))
    return pieces


def _draft_pieces(record: dict[str, Any], decode: Decode) -> Iterator[Piece]:
    cut, is_cut = record["cut"], False
    ends = pairwise([0, *record["prefix_ends"]])
    for (start, end), verdict in zip(ends, record["verdicts"], strict=True):
        fate = "kept" if end <= cut else "dropped" if is_cut else "rejected"
        is_cut = end > cut
        yield Piece("draft", decode(record["draft_token_ids"][start:end]), verdict, fate)


_STYLES = {"kept": "green", "rejected": "bold red strike", "dropped": "dim strike"}


def annotated_answer(pieces: Sequence[Piece]) -> Table:
    """One row per segment: its author, the verdict on the answer up to here, what became of it."""
    table = Table(box=box.SIMPLE_HEAD, title="One answer as it was made")
    for name in ("written by", "text", "verdict", ""):
        table.add_column(name, justify="right" if name == "verdict" else "left")
    for piece in pieces:
        if piece.fate == "rejected":
            table.add_row("", Text("-" * 8 + " cut " + "-" * 8, "bold yellow"), "", "")
        style = "cyan" if piece.author == "target" else _STYLES[piece.fate]
        verdict = "" if piece.verdict is None else f"{piece.verdict:.3f}"
        table.add_row(
            piece.author,
            Text(piece.text.rstrip("\n"), style),
            Text(verdict, style.replace(" strike", "")),
            "" if piece.fate == "kept" else piece.fate,
        )
    return table
