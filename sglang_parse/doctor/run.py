"""``sglang-parse doctor``: makes the checks, prints each, and returns whether all passed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from sglang_parse.client.program import ProgressLog
from sglang_parse.doctor import machine, served, start
from sglang_parse.doctor.finding import FAILS, NOT_CHECKED, OK, WARNING, Check, Finding, run_check
from sglang_parse.doctor.settings import DoctorSettings

STYLES = {OK: "green", WARNING: "yellow", FAILS: "bold red", NOT_CHECKED: "dim"}


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Returns the exit code: 1 if a check fails, else another if Ctrl-C or SIGTERM ended it."""
    settings, flags = DoctorSettings.read(arguments), arguments.server_flags
    found: list[Finding] = []
    code: Any = 0

    def show(one: Finding) -> None:
        found.append(one)
        if not settings.json:
            console.print(row(one))

    try:
        for name, check in _checks(settings, flags):
            show(run_check(name, check))
    except (KeyboardInterrupt, SystemExit) as ended:
        code = ended.code if isinstance(ended, SystemExit) else 130
        left = ", ".join(_left(settings, flags, found))
        show(Finding("ended", NOT_CHECKED, f"not done: {left}"))
    works = all(one.status != FAILS for one in found)
    if settings.json:
        content = {"works": works, "findings": [asdict(one) for one in found]}
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
    elif not (flags or settings.url):
        console.print("Give the flags of a server, or --url, to check it, too.")
    return code if works else 1


def _checks(settings: DoctorSettings, flags: Sequence[str]) -> Iterator[Check]:
    if flags or not settings.url:
        yield from machine.checks()
    if flags:
        made = start.Start(flags).checks()
        # With --url the port is in use, rightly.
        yield from (check for check in made if not (settings.url and check[0] == "port"))
    if settings.url:
        yield from served.Served(settings, ProgressLog(Console(stderr=True))).checks()


def _left(settings: DoctorSettings, flags: Sequence[str], found: Sequence[Finding]) -> list[str]:
    """Returns the names of checks after the last one made."""
    names = [*(start.NAMES if flags else ()), *(served.NAMES if settings.url else ())]
    made = [names.index(one.check) for one in found if one.check in names]
    return names[max(made, default=-1) + 1 :] or ["further prompts"]


def row(one: Finding) -> Table:
    """Name, status and what was found, with its fix below."""
    name, status = Column(width=16, no_wrap=True), Column(width=11, no_wrap=True)
    shown = Table.grid(name, status, Column(overflow="fold"), padding=(0, 2, 0, 0))
    text = Text(one.found)
    if one.fix:
        text.append(f"\nFix: {one.fix}", "bold")
    shown.add_row(one.check, Text(one.status, STYLES[one.status]), text)
    return shown
