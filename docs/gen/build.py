"""MkDocs hooks: fill in the tables and add the pictures that are generated from the code."""

from __future__ import annotations

from typing import Any

import pictures
import tables
from mkdocs.structure.files import File, Files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fills in the tables of a page."""
    return tables.fill(markdown)


def on_files(files: Files, config: Any) -> Files:
    """Adds the generated pictures to the site's files."""
    for name, draw in pictures.PICTURES.items():
        files.append(File.generated(config, f"pictures/{name}.svg", content=draw()))
    return files
