"""What has been asked, on disk: a calibration that was ended goes on where it was.

A JSONL file: what its lines were measured with, then one line each.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sglang_parse.client.records import BenchError


class Store:
    """Lines of one file.

    Args:
        path: the file; it is made.
        conditions: what every line was measured with.

    Raises:
        BenchError: the file was measured with something else.
    """

    def __init__(self, path: Path, conditions: Mapping[str, Any]) -> None:
        self._path = path
        self.lines: list[dict[str, Any]] = []
        wanted = json.loads(json.dumps(conditions))
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(wanted) + "\n", encoding="utf-8")
            return
        found, *self.lines = _read(path)
        if found != wanted:
            differ = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
            raise BenchError(
                f"{path} was measured with another {', '.join(differ)}; fix: give another "
                "--output, or move the file away"
            )

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        new = [dict(line) for line in lines]
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in new)
        self.lines += new


def _read(path: Path) -> list[dict[str, Any]]:
    """Its lines; a last one that was being written when the program ended is cut off."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        path.write_bytes(whole)
    try:
        return [json.loads(line) for line in whole.splitlines()] or [{}]
    except json.JSONDecodeError as error:
        raise BenchError(f"{path} is damaged ({error}); fix: move it away") from error
