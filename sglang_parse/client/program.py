"""What is the same of every program around its work: what it says, writes and returns.

A program is a module with ``run(arguments, console) -> exit code``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_parse.client.records import BenchError

Run = Callable[[argparse.Namespace, Console], int]


def run_program(name: str, run: Run, arguments: argparse.Namespace) -> int:
    """The exit code: the program's, or 1 after an error of ours, told in one line of stderr.

    A figure that misses its mark is reported and is no error.
    """
    try:
        return run(arguments, Console())
    except BenchError as error:
        print(f"sglang-parse {name}: {error}", file=sys.stderr)
        return 1


class Teller:
    """Says what is going on, each line with the seconds since the start."""

    def __init__(self, console: Console) -> None:
        self._console, self._started = console, time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def __call__(self, text: str) -> None:
        self._console.print(f"{self.seconds:5.0f} s  {text}", markup=False, highlight=False)


def write_json(path: Path, content: Any, indent: int = 2) -> None:
    """Plain data as a file; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=indent) + "\n", encoding="utf-8")
