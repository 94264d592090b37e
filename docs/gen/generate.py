"""Rewrites the generated parts of the documents: ``make generate``.

A part of a page stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``, with a NAME of
``PARTS``: tables of the code (``tables``) and of measurements (``figures``). Pictures are whole
files (``pictures``). Tests compare the committed files with what is generated.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

import figures
import pictures
import tables

ROOT = Path(__file__).resolve().parents[2]
PATCH_PAGES = (ROOT / "patches" / "README.md", ROOT / "docs" / "patches.md")
"""Their parts need SGLang."""
PAGES = (ROOT / "README.md", *sorted({*(ROOT / "docs").glob("*.md")} - {*PATCH_PAGES}))
PICTURES = ROOT / "docs" / "pictures"
PARTS = tables.TABLES | figures.PARTS
START = "<!-- generated: "
MARK = re.compile(rf"^{START}(\S[^\n]*) -->$.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)


def fill(page: str) -> str:
    """Returns a page with its generated parts as the code makes them now.

    Raises:
        KeyError: a name is not in ``PARTS``.
        ValueError: a part has no end.
    """
    if len(MARK.findall(page)) != len(re.findall(f"^{START}", page, re.MULTILINE)):
        raise ValueError('a generated part has no end; add "<!-- end -->" on a line of its own')
    return MARK.sub(
        lambda part: f"{START}{part[1]} -->\n\n{PARTS[part[1]]()}\n\n<!-- end -->", page
    )


def outdated(pages: Iterable[Path]) -> dict[Path, str]:
    """Returns those of ``pages`` and of the pictures that are not as generated, and their text."""
    made = {path: fill(path.read_text(encoding="utf-8")) for path in pages}
    made |= {PICTURES / f"{name}.svg": draw() for name, draw in pictures.PICTURES.items()}
    return {
        path: text
        for path, text in made.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    }


def main(folders: list[str]) -> None:
    """Takes over the results in ``folders`` (build/demo and the like), then rewrites the files."""
    for folder in folders:
        print(figures.take_over(Path(folder)).relative_to(ROOT))
    for path, text in outdated((*PAGES, *PATCH_PAGES)).items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main(sys.argv[1:])
