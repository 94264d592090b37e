"""What the demo's command line can ask for."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sglang_parse.bench.demo.records import DemoError

REPOSITORY = Path(__file__).resolve().parents[3]
DEMO_PAIR = REPOSITORY / "examples" / "demo_pair"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line asked for.

    Attributes:
        pair: folder with ``target`` and ``draft``.
        problems: per server in the timed legs; a third one at a time, the rest concurrently.
        accuracy_problems: per server in all; what is missing is sent after the timed legs.
    """

    pair: Path
    problems: int
    accuracy_problems: int
    runs: int
    concurrency: int
    output: Path

    @classmethod
    def read(cls, arguments: argparse.Namespace) -> Settings:
        """From a parsed command line.

        Raises:
            DemoError: a run would have too few problems.
        """
        settings = cls(
            pair=arguments.pair,
            problems=arguments.problems,
            accuracy_problems=arguments.accuracy_problems,
            runs=arguments.runs,
            concurrency=arguments.concurrency,
            output=arguments.output,
        )
        if settings.problems < 2 * settings.runs:
            raise DemoError(
                f"--problems is {settings.problems}, too few for --runs {settings.runs}; "
                f"use {2 * settings.runs} or more"
            )
        return settings

    @property
    def total_problems(self) -> int:
        return max(self.problems, self.accuracy_problems)

    def parts(self) -> list[tuple[int, range, range]]:
        """Per run: its number, problems sent one at a time, problems sent concurrently."""
        bounds = [self.problems * k // self.runs for k in range(self.runs + 1)]
        parts = []
        for run, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            middle = start + max(1, (end - start) // 3)
            parts.append((run, range(start, middle), range(middle, end)))
        return parts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``sglang-parse demo``."""
    parser.add_argument("--pair", type=Path, default=DEMO_PAIR, help="folder with target/, draft/")
    parser.add_argument(
        "--problems",
        type=at_least(1),
        default=108,
        help="held-out problems per server in the timed runs (default %(default)s)",
    )
    parser.add_argument(
        "--accuracy-problems",
        type=at_least(0),
        default=300,
        help="held-out problems per server in all, for the accuracy (default %(default)s)",
    )
    parser.add_argument(
        "--runs", type=at_least(1), default=3, help="timed runs; medians are reported"
    )
    parser.add_argument(
        "--concurrency", type=at_least(2), default=8, help="requests at a time, beside 1"
    )
    parser.add_argument("--output", type=Path, default=Path("build/demo.json"))


def at_least(low: int) -> Callable[[str], int]:
    """An argparse type: whole numbers from ``low``."""

    def number(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is too small; use {low} or more")
        return value

    return number
