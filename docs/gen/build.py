"""What `make docs` adds to the pages: tables and pictures that are made from the code.

A line ``{{ name }}`` in a page stands for the table of that name in ``tables.TABLES``.
"""

from __future__ import annotations

import re
from typing import Any

import pictures
import tables
from mkdocs.structure.files import File, Files

MARK = re.compile(r"^\{\{ (.+) \}\}$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls it with every page's source. Raises: KeyError, for a table there is not."""
    return MARK.sub(lambda found: tables.TABLES[found[1]](), markdown)


def on_files(files: Files, config: Any) -> Files:
    """MkDocs calls it with all of the site's files."""
    for name, make in pictures.PICTURES.items():
        files.append(File.generated(config, f"pictures/{name}.svg", content=make()))
    return files
