"""Pictures of the documentation, drawn by the code: the masks of a verify pass, and speeds."""

from __future__ import annotations

from collections.abc import Iterable

from figures import TITLES, Figures

from sglang_parse.client.records import EAGLE3, PARSE, PLAIN, STANDALONE
from sglang_parse.core.layout import RequestLayout
from sglang_parse.core.mask import may_attend

CELL, LEFT, TOP = 34, 70, 54
NAMES = ("prompt", "d0", "d1", "d2", "d3", "q0", "q0", "q1", "q1")
LAYOUT = RequestLayout(prefix_len=1, num_draft_rows=4, visible_lens=(2, 4), question_lens=(2, 2))
"""Two segments of two tokens, questions of two tokens; the prompt is one column."""
WITHOUT = RequestLayout(prefix_len=1, num_draft_rows=4, visible_lens=(), question_lens=())
"""The same draft under a verdict head."""
BAR, GAP, WIDEST = 18, 14, 420
BARS = {PARSE: "draft", EAGLE3: "question", STANDALONE: "prompt", PLAIN: "prompt"}
"""Servers in the picture of speeds, and their colours."""
STYLE = """<style>
text { font: 14px system-ui, sans-serif; fill: #1f2328; text-anchor: middle }
.note { text-anchor: start }
.prompt { fill: #b7c0cc } .draft { fill: #5b9bd5 } .question { fill: #e0a030 } .none { fill: none }
.cell { stroke: #8b949e; stroke-width: 1 } .line { stroke: #1f2328; stroke-width: 2 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .line { stroke: #e6edf3 } }
</style>"""


def kind(layout: RequestLayout, column: int) -> str:
    """Returns the kind of KV in a column."""
    if column < layout.prefix_len:
        return "prompt"
    return "draft" if column < layout.prefix_len + layout.num_draft_rows else "question"


def cell(layout: RequestLayout, row: int, column: int) -> str:
    shown = kind(layout, column) if may_attend(layout, row, column) else "none"
    x, y = LEFT + column * CELL, TOP + row * CELL
    return f'<rect class="cell {shown}" x="{x}" y="{y}" width="{CELL}" height="{CELL}"/>'


def label(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text class="{style}" x="{x}" y="{y}">{text}</text>'


def svg(width: int, height: int, parts: Iterable[str]) -> str:
    size = f'viewBox="0 0 {width} {height}" width="{width}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{STYLE}{"".join(parts)}</svg>\n'


def draw(layout: RequestLayout, notes: dict[int, str]) -> str:
    """Draws a request's rows of a verify pass, which attend to the filled columns.

    Args:
        notes: row -> text beside it.
    """
    width, height = LEFT + layout.kv_len * CELL, TOP + layout.num_rows * CELL
    columns = [
        label(LEFT + (column + 0.5) * CELL, TOP - 10, name if column else "p")
        for column, name in enumerate(NAMES[: layout.kv_len])
    ]
    rows = [
        label(LEFT - 24, TOP + (row + 0.65) * CELL, NAMES[layout.prefix_len + row])
        for row in range(layout.num_rows)
    ]
    cells = [
        cell(layout, row, column)
        for row in range(layout.num_rows)
        for column in range(layout.kv_len)
    ]
    cuts = [TOP + row * CELL for row in range(2, layout.num_rows, 2)]
    lines = [f'<path class="line" d="M{LEFT} {y}H{width}"/>' for y in cuts]
    texts = [
        label(width + 16, TOP + (row + 0.65) * CELL, text, "note") for row, text in notes.items()
    ]
    parts = [*columns, *rows, *cells, *lines, *texts, label(LEFT, 20, "p: the prompt", "note")]
    return svg(width + 250, height + 10, parts)


def mask() -> str:
    """Draws a pass with a question per prefix."""
    notes = {
        0: "segment 0",
        2: "segment 1",
        4: "question 0: prefix 0 and itself,",
        5: "never later draft",
        6: "question 1: prefix 1 and itself,",
        7: "never question 0",
    }
    return draw(LAYOUT, notes)


def causal() -> str:
    """Draws a pass without questions."""
    notes = {
        0: "segment 0",
        1: "verdict 0: from d0 and d1",
        2: "segment 1",
        3: "verdict 1: from d0 to d3",
    }
    return draw(WITHOUT, notes)


def speed() -> str:
    """Draws the demo's output tokens/s: a group of bars for each number of concurrent requests."""
    figures = Figures("demo")
    speeds = {
        (one, at_once): figures.speed(one, at_once)
        for at_once in figures.concurrencies
        for one in BARS
    }
    scale = WIDEST / max(speed["tokens_per_s"] for speed in speeds.values())
    left, y, parts = 2 * LEFT, 0, list[str]()
    for at_once in figures.concurrencies:
        title = f"{at_once} request{'s' * (at_once > 1)} at a time"
        y += BAR + GAP
        parts.append(label(0, y - 6, title, "note"))
        for one, style in BARS.items():
            found = speeds[one, at_once]
            width = round(found["tokens_per_s"] * scale)
            text = f"{found['tokens_per_s']:,.0f} tokens/s"
            if one != PLAIN:
                text += f", {found['over'][PLAIN]:.1f}x"
            parts += [
                label(10, y + BAR - 5, TITLES[one], "note"),
                f'<rect class="{style}" x="{left}" y="{y}" width="{width}" height="{BAR - 2}"/>',
                label(left + width + 8, y + BAR - 5, text, "note"),
            ]
            y += BAR
    return svg(left + WIDEST + 180, y + GAP, parts)


PICTURES = {"mask": mask, "causal": causal, "speed": speed}
