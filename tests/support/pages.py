"""The README, the pages of docs/, and the tables that are made from the code."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = Path("README.md")
PAGES = {
    path.relative_to(ROOT): path.read_text(encoding="utf-8")
    for path in (ROOT / README, *sorted((ROOT / "docs").glob("*.md")))
}
"""Sources by their path from the root."""
_MADE = runpy.run_path(str(ROOT / "docs" / "gen" / "tables.py"))
TABLES = _MADE["TABLES"]
"""Name -> function that makes the table."""


def page(name: str) -> str:
    """A page of docs/ with its tables."""
    return _MADE["fill"](PAGES[Path("docs") / f"{name}.md"])
