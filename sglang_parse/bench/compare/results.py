"""The comparison as results.json: figures, every run, every mark, the conditions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_parse.bench.compare.figures import Figures
from sglang_parse.bench.compare.records import Marks, Timed
from sglang_parse.bench.demo.figures import rounded


def results(
    figures: Figures, timed: Sequence[Timed], marks: Sequence[Marks], facts: dict[str, Any]
) -> dict[str, Any]:
    """Plain data: what the page shows, and what it was computed from."""
    return {
        "conditions": facts,
        **figures.as_json(),
        "timed": [rounded(asdict(item)) for item in timed],
        "marks": [
            {
                **asdict(graded.way),
                "repeat": graded.repeat,
                "output_tokens": graded.output_tokens,
                "scores": list(graded.scores),
            }
            for graded in marks
        ],
    }


def write_results(path: Path, content: dict[str, Any]) -> None:
    """One line per entry of the long lists would be unreadable: indented throughout."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
