"""Pictures of the documentation, drawn by the code: the mask of a verify pass."""

from __future__ import annotations

from sglang_parse.core.layout import RequestLayout
from sglang_parse.core.mask import may_attend

CELL, LEFT, TOP = 34, 70, 54
NAMES = ("prompt", "d0", "d1", "d2", "d3", "q0", "q0", "q1", "q1")
LAYOUT = RequestLayout(prefix_len=1, num_draft_rows=4, visible_lens=(2, 4), question_lens=(2, 2))
"""Two segments of two tokens, questions of two tokens; the prompt is one column."""
STYLE = """<style>
text { font: 14px system-ui, sans-serif; fill: #1f2328; text-anchor: middle }
.note { text-anchor: start }
.prompt { fill: #b7c0cc } .draft { fill: #5b9bd5 } .question { fill: #e0a030 } .none { fill: none }
.cell { stroke: #8b949e; stroke-width: 1 } .line { stroke: #1f2328; stroke-width: 2 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .line { stroke: #e6edf3 } }
</style>"""


def kind(column: int) -> str:
    """Returns the kind of KV in a column."""
    if column < LAYOUT.prefix_len:
        return "prompt"
    return "draft" if column < LAYOUT.prefix_len + LAYOUT.num_draft_rows else "question"


def cell(row: int, column: int) -> str:
    shown = kind(column) if may_attend(LAYOUT, row, column) else "none"
    x, y = LEFT + column * CELL, TOP + row * CELL
    return f'<rect class="cell {shown}" x="{x}" y="{y}" width="{CELL}" height="{CELL}"/>'


def label(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text class="{style}" x="{x}" y="{y}">{text}</text>'


def mask() -> str:
    """Draws the README's example: rows attend to the filled columns."""
    width, height = LEFT + LAYOUT.kv_len * CELL, TOP + LAYOUT.num_rows * CELL
    columns = [
        label(LEFT + (column + 0.5) * CELL, TOP - 10, name if column else "p")
        for column, name in enumerate(NAMES)
    ]
    rows = [
        label(LEFT - 24, TOP + (row + 0.65) * CELL, NAMES[LAYOUT.prefix_len + row])
        for row in range(LAYOUT.num_rows)
    ]
    cells = [cell(row, column) for row in range(LAYOUT.num_rows) for column in range(LAYOUT.kv_len)]
    cuts = [TOP + rows_above * CELL for rows_above in (0, 2, 4, 6)]
    lines = [f'<path class="line" d="M{LEFT} {y}H{width}"/>' for y in cuts[1:]]
    notes = [
        label(width + 16, TOP + (row + 0.65) * CELL, text, "note")
        for row, text in (
            (0, "segment 0"),
            (2, "segment 1"),
            (4, "question 0: prefix 0 and itself,"),
            (5, "never later draft"),
            (6, "question 1: prefix 1 and itself,"),
            (7, "never question 0"),
        )
    ]
    parts = [*columns, *rows, *cells, *lines, *notes, label(LEFT, 20, "p: the prompt", "note")]
    size = f'viewBox="0 0 {width + 250} {height + 10}" width="{width + 250}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{STYLE}{"".join(parts)}</svg>\n'


PICTURES = {"mask": mask}
