"""Common parts of programs: exit codes, log lines, JSON files."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_parse.client.records import BenchError

Run = Callable[[argparse.Namespace, Console], int]


def run_program(name: str, run: Run, arguments: argparse.Namespace) -> int:
    """Runs a program; returns its exit code, or 1 after printing a ``BenchError`` to stderr."""
    try:
        # Output to a file has no width; tables need this much.
        return run(arguments, Console(width=None if sys.stdout.isatty() else 140))
    except BenchError as error:
        print(f"sglang-parse {name}: {error}", file=sys.stderr)
        return 1


class ProgressLog:
    """Prints progress, each line with the seconds since the start."""

    def __init__(self, console: Console) -> None:
        self._console, self._started = console, time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def __call__(self, text: str) -> None:
        self._console.print(f"{self.seconds:5.0f} s  {text}", markup=False, highlight=False)


def write_json(path: Path, content: Any) -> None:
    """Writes plain data, and paths as text, to a file and makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, default=os.fspath) + "\n", encoding="utf-8")
