"""``sglang-parse doctor``: runs the checks, prints them, and returns whether all passed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_parse.doctor import machine, served, start
from sglang_parse.doctor.finding import FAILS, NOT_CHECKED, OK, WARNING, Finding
from sglang_parse.doctor.settings import DoctorSettings

STYLES = {OK: "green", WARNING: "yellow", FAILS: "bold red", NOT_CHECKED: "dim"}


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Returns the exit code: 1 if a check fails."""
    settings, flags = DoctorSettings.read(arguments), arguments.server_flags
    found: list[Finding] = []
    if flags or not settings.url:
        found += machine.findings()
    if flags:
        found += start.findings(flags)
    if settings.url:
        found += served.findings(settings)
    works = all(one.status != FAILS for one in found)
    if settings.json:
        content = {"works": works, "findings": [asdict(one) for one in found]}
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
    else:
        console.print(table(found))
        if not (flags or settings.url):
            console.print("Give the flags of a server, or --url, to check it, too.")
    return 0 if works else 1


def table(findings: Sequence[Finding]) -> Table:
    """A row per finding, with its fix below."""
    shown = Table(box=box.SIMPLE_HEAD)
    shown.add_column("check", no_wrap=True)
    shown.add_column("status", no_wrap=True)
    shown.add_column("found, and fix", overflow="fold")
    for one in findings:
        text = Text(one.found)
        if one.fix:
            text.append(f"\nFix: {one.fix}", "bold")
        shown.add_row(one.check, Text(one.status, STYLES[one.status]), text)
    return shown
