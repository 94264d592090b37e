"""What `make docs` adds to the pages: tables and pictures that are made from the code."""

from __future__ import annotations

from typing import Any

import pictures
import tables
from mkdocs.structure.files import File, Files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls it with every page's source."""
    return tables.fill(markdown)


def on_files(files: Files, config: Any) -> Files:
    """MkDocs calls it with all of the site's files."""
    for name, draw in pictures.PICTURES.items():
        files.append(File.generated(config, f"pictures/{name}.svg", content=draw()))
    return files
