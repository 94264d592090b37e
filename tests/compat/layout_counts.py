"""Prints what the two layouts of a pass make a GPU's kernels read, without a GPU.

    PYTHONPATH=tests python tests/compat/layout_counts.py

That is where ``attention.support`` has its preferences for them from; ``tests/gpu/mask_cost.py``
measures them.
"""

from __future__ import annotations

from itertools import product

from rich.console import Console
from rich.table import Table

from sglang_parse.core.layout import RequestLayout, VerifyLayout
from support.tiles import KERNELS

CONTEXTS = (2048, 8192, 32768)
DRAFT, QUESTIONS, QUESTION_LEN, HEADS_PER_KV_HEAD = 256, 16, 60, 8


def main() -> None:
    table = Table(title=f"{1 + DRAFT} + {QUESTIONS} x {QUESTION_LEN} rows, one KV head, one layer")
    for name in ("context", "kernel", "layout", "tiles", "columns loaded", "mask MiB", "tested"):
        table.add_column(name, justify="right")
    cuts = tuple(1 + DRAFT * (i + 1) // QUESTIONS for i in range(QUESTIONS))
    for context, (name, count), is_masked in product(CONTEXTS, KERNELS.items(), (True, False)):
        request = RequestLayout(context, 1 + DRAFT, cuts, (QUESTION_LEN,) * QUESTIONS)
        found = count(VerifyLayout.of([request]), HEADS_PER_KV_HEAD, is_masked=is_masked)
        table.add_row(
            f"{context:,}",
            name,
            "mask" if is_masked else "alias",
            str(found.tiles),
            f"{found.columns:,}",
            f"{found.mask_bytes / 2**20:.1f}",
            f"{found.tested / 2**20:.0f} Mi",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
