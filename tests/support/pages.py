"""The README, the pages of docs/, and the functions that make their tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tables import TABLES

ROOT = Path(__file__).resolve().parents[2]
README = Path("README.md")
PAGES = {
    path.relative_to(ROOT): path.read_text(encoding="utf-8")
    for path in (ROOT / README, *sorted((ROOT / "docs").glob("*.md")))
}
"""Path from the root -> source."""


def page(name: str) -> str:
    """Returns a page of docs/."""
    return PAGES[Path("docs") / f"{name}.md"]


def report_keys(content: Any, path: str = "") -> Iterator[str]:
    """Yields the dotted keys of a report, spelled as in the documents."""
    if isinstance(content, list):
        content = content[0]
    if not isinstance(content, dict):
        yield path
        return
    for key, value in content.items():
        if path == "servers":
            key = "<server>"
        names = {"one": "<speed>", "concurrent": "<speed>"}
        names |= {"stages_one": "<stages>", "stages_concurrent": "<stages>"}
        if value is not None:
            yield from report_keys(value, f"{path}.{names.get(key, key)}".lstrip("."))


def documented_keys(table: str) -> set[str]:
    """Returns the keys in a generated table; "`a.b`, `.c`" are a.b and a.c."""
    found: set[str] = set()
    for row in TABLES[table]().splitlines()[2:]:
        names = re.findall(r"`([^`]+)`", row.split("|")[1])
        parent = names[0].rpartition(".")[0]
        found.update(parent + name if name.startswith(".") else name for name in names)
    return found
