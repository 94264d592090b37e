"""What the command line of ``sglang-parse doctor`` can ask for."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from sglang_parse.client.flags import Flags, at_least, option
from sglang_parse.client.prompts import PROMPTS_HELP


@dataclass(frozen=True)
class DoctorSettings(Flags):
    url: str = option("", "URL of a running server to check, too")
    prompts: Path | None = option(None, PROMPTS_HELP, type=Path, metavar="FILE")
    requests: int = option(6, "prompts sent, with PARSE and without", type=at_least(1))
    max_tokens: int = option(200, "longest answer, in tokens", type=at_least(8))
    budget: int = option(
        50,
        "seconds for a running server; then it says what it has",
        type=at_least(1),
        metavar="SECONDS",
    )
    json: bool = option(False, "print JSON and nothing else", action="store_true")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the doctor's flags; all others are the server's."""
    DoctorSettings.add_arguments(parser)
    parser.usage = f"{parser.prog} [--url URL] [--json] [flags of python -m sglang.launch_server]"
