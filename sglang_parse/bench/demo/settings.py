"""What the command line of ``sglang-parse demo`` can ask for."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path

from sglang_parse.bench.harness.demo_pair import DEMO_PAIR
from sglang_parse.bench.harness.program import at_least
from sglang_parse.bench.harness.records import BenchError


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What was asked for.

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
    def read(cls, arguments: argparse.Namespace) -> DemoSettings:
        """From a parsed command line.

        Raises:
            BenchError: a run would have too few problems.
        """
        settings = cls(*(getattr(arguments, field.name) for field in fields(cls)))
        if settings.problems < 2 * settings.runs:
            raise BenchError(
                f"--problems is {settings.problems}, too few for --runs {settings.runs}; "
                f"use {2 * settings.runs} or more"
            )
        return settings

    @property
    def total_problems(self) -> int:
        return max(self.problems, self.accuracy_problems)

    def parts(self) -> list[tuple[range, range]]:
        """Per run: problems sent one at a time, problems sent concurrently."""
        bounds = [self.problems * k // self.runs for k in range(self.runs + 1)]
        parts = []
        for start, end in zip(bounds, bounds[1:], strict=False):
            middle = start + max(1, (end - start) // 3)
            parts.append((range(start, middle), range(middle, end)))
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
