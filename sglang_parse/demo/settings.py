"""What the command line of ``sglang-parse demo`` can ask for."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from sglang_parse.client.demo_pair import DEMO_PAIR
from sglang_parse.client.flags import Flags, at_least, option
from sglang_parse.client.records import BenchError


@dataclass(frozen=True)
class DemoSettings(Flags):
    """What was asked for. Of ``problems`` a third is sent one at a time, the rest concurrently."""

    pair: Path = option(DEMO_PAIR, "folder with target/, draft/", type=Path)
    problems: int = option(
        108,
        "held-out problems per server in the timed runs (default %(default)s)",
        type=at_least(1),
    )
    accuracy_problems: int = option(
        300,
        "held-out problems per server in all, for the accuracy (default %(default)s)",
        type=at_least(0),
    )
    runs: int = option(3, "timed runs; medians are reported", type=at_least(1))
    concurrency: int = option(8, "requests at a time, beside 1", type=at_least(2))
    output: Path = option(Path("build/demo.json"), type=Path)

    @classmethod
    def read(cls, arguments: argparse.Namespace) -> DemoSettings:
        """Raises: BenchError, when a run would have too few problems."""
        settings = super().read(arguments)
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


add_arguments = DemoSettings.add_arguments
