"""What the command line of ``sglang-parse doctor`` can ask for."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from sglang_parse.client.flags import Flags, at_least, option


@dataclass(frozen=True)
class DoctorSettings(Flags):
    """What was asked for.

    Attributes:
        url: a running server; "" for none.
        prompts: file with what it is asked.
        requests: how many prompts it is asked, each once with PARSE and once without.
        json: print JSON in place of the table.
    """

    url: str = option("", "look at the server that runs there, too")
    prompts: Path | None = option(
        None,
        'what to ask it: lines of JSON, each a text or an object with "prompt" (default: problems '
        "of the demo pair for a target of its own, a few questions for others)",
        type=Path,
        metavar="FILE",
    )
    requests: int = option(
        6, "prompts asked, with PARSE and without (default %(default)s)", type=at_least(1)
    )
    max_tokens: int = option(
        200, "longest answer, in tokens (default %(default)s)", type=at_least(8)
    )
    json: bool = option(False, "print JSON and nothing else", action="store_true")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``sglang-parse doctor``; all others are a server's."""
    DoctorSettings.add_arguments(parser)
    parser.usage = f"{parser.prog} [--url URL] [--json] [flags of python -m sglang.launch_server]"
