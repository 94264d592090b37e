"""The demo: three servers, the same held-out problems, one table, one answer looked at closely.

The servers take turns run by run, so that a machine busy with something else slows all of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sglang_parse.demo.figures import Figures, make_figures
from sglang_parse.demo.load import IsRight, run_together, send_problems, trace_answer
from sglang_parse.demo.records import DRAFT, PARSE, PLAIN, TITLES, DemoError, Leg, Problem
from sglang_parse.demo.servers import Server, ServerSpec, awake, servers
from sglang_parse.demo.show import annotated_answer, figures_table, pieces_of_answer, show_checks

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO_PAIR = REPOSITORY / "examples" / "demo_pair"
NAMES = (PLAIN, PARSE, DRAFT)
MAX_TRACES = 5


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
        type=_at_least(1),
        default=108,
        help="held-out problems per server in the timed runs (default %(default)s)",
    )
    parser.add_argument(
        "--accuracy-problems",
        type=_at_least(0),
        default=500,
        help="held-out problems per server in all, for the accuracy (default %(default)s)",
    )
    parser.add_argument(
        "--runs", type=_at_least(1), default=3, help="timed runs; medians are reported"
    )
    parser.add_argument(
        "--concurrency", type=_at_least(2), default=8, help="requests at a time, beside 1"
    )
    parser.add_argument("--output", type=Path, default=Path("build/demo.json"))


def _at_least(low: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is too small; use {low} or more")
        return value

    return number


def main(arguments: argparse.Namespace) -> int:
    """Exit code: 0 when every figure was measured, even one that misses its mark; 1 otherwise."""
    settings = Settings(
        pair=arguments.pair,
        problems=arguments.problems,
        accuracy_problems=arguments.accuracy_problems,
        runs=arguments.runs,
        concurrency=arguments.concurrency,
        output=arguments.output,
    )
    # So that `finally` ends the servers after a plain `kill` too.
    signal.signal(signal.SIGTERM, _leave)
    try:
        run_demo(settings, Console())
    except DemoError as error:
        print(f"sglang-parse demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("sglang-parse demo: interrupted; all servers were ended", file=sys.stderr)
        return 130
    return 0


def _leave(number: int, frame: FrameType | None) -> None:
    del frame
    sys.exit(128 + number)


def run_demo(settings: Settings, console: Console) -> None:
    """Raises: DemoError."""
    started = time.monotonic()
    if settings.problems < 2 * settings.runs:
        raise DemoError(
            f"--problems is {settings.problems}, too few for --runs {settings.runs}; "
            f"use {2 * settings.runs} or more"
        )
    module = load_problems()
    problems = module.held_out_problems(settings.total_problems)
    logs = settings.output.parent / "demo-logs"
    with _progress(console) as progress:
        task = progress.add_task("starting three servers", total=len(NAMES))
        with servers(specs(settings.pair), logs, lambda: progress.advance(task)) as running:
            stage = _Stage(settings, running, problems, module.is_answer_right, progress)
            stage.warm_up()
            legs = stage.timed_legs() + stage.accuracy_legs()
            trace = stage.trace_of_a_cut_draft(legs)
    figures = make_figures(legs, settings.concurrency)
    write_figures(settings, figures, time.monotonic() - started)
    console.print(figures_table(figures, settings.concurrency))
    show_checks(console, figures)
    console.print(f"the same figures: {settings.output}\n")
    _show_trace(settings, console, trace)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<34}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def specs(pair: Path) -> list[ServerSpec]:
    """The three servers: same flags, same models, PARSE on or not."""
    target, draft = pair / "target", pair / "draft"
    for folder in (target, draft):
        if not (folder / "config.json").is_file():
            raise DemoError(
                f"{folder} is not a model (no config.json); fix: give --pair a folder with "
                "target/ and draft/, or make one with `make train-demo-pair`"
            )
    parse_flags = (
        *("--speculative-algorithm", "PARSE", "--speculative-draft-model-path", str(draft)),
        *("--parse-question", str(DEMO_PAIR / "question.json"), "--parse-segment", "line"),
    )
    return [
        ServerSpec(PLAIN, ("--model-path", str(target))),
        ServerSpec(PARSE, ("--model-path", str(target), *parse_flags)),
        ServerSpec(DRAFT, ("--model-path", str(draft))),
    ]


def load_problems() -> ModuleType:
    """``examples/demo_pair/problems.py``, a script's neighbour and in no package."""
    path = DEMO_PAIR / "problems.py"
    spec = importlib.util.spec_from_file_location("demo_pair_problems", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise DemoError(f"{path} is missing; run the demo from a checkout of the repository")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


class _Stage:
    """The servers, the problems, and who plays when."""

    def __init__(
        self,
        settings: Settings,
        running: dict[str, Server],
        problems: Sequence[Problem],
        is_right: IsRight,
        progress: Progress,
    ) -> None:
        self.settings, self.running, self.problems = settings, running, problems
        self.is_right, self.progress = is_right, progress

    def warm_up(self) -> None:
        """A first request is slower than all others; it is not measured."""
        for name in NAMES:
            with awake(self.running[name]):
                self._leg(name, range(1), run=-1, concurrency=1, task=None)

    def timed_legs(self) -> list[Leg]:
        legs = []
        for run, one, many in self.settings.parts():
            for name in NAMES:
                title = f"run {run + 1}/{self.settings.runs}: {TITLES[name]}"
                task = self.progress.add_task(title, total=len(one) + len(many))
                with awake(self.running[name]):
                    legs.append(self._leg(name, one, run, 1, task))
                    legs.append(self._leg(name, many, run, self.settings.concurrency, task))
        return legs

    def accuracy_legs(self) -> list[Leg]:
        """The remaining problems, to all servers at once: only the answers count."""
        rest = range(self.settings.problems, self.settings.total_problems)
        if not rest:
            return []
        task = self.progress.add_task("accuracy: all three at once", total=len(NAMES) * len(rest))
        calls = [
            partial(self._leg, name, rest, -1, self.settings.concurrency, task) for name in NAMES
        ]
        with awake(*self.running.values()):
            return run_together(calls, len(NAMES))

    def trace_of_a_cut_draft(self, legs: Sequence[Leg]) -> tuple[str, list[dict[str, Any]]]:
        """Text and trace of an answer whose draft was cut, of any answer if none was.

        Problems that were right in the end come first: there the target saved the answer.
        """
        answers = [answer for leg in legs if leg.server == PARSE for answer in leg.answers]
        cut = [a for a in answers if a.parse["accepted_tokens"] < a.parse["drafted_tokens"]]
        chosen = sorted(cut, key=lambda a: not a.is_right)[:MAX_TRACES] or answers[:1]
        with awake(self.running[PARSE]):
            for answer in chosen:
                text, info = trace_answer(self.running[PARSE], self.problems[answer.problem])
                trace = info["trace"]
                if any(record["cut"] < max(record["prefix_ends"], default=0) for record in trace):
                    break
        return text, trace

    def _leg(self, name: str, indices: Sequence[int], run: int, concurrency: int, task: Any) -> Leg:
        def on_answer() -> None:
            if task is not None:
                self.progress.advance(task)

        return send_problems(
            self.running[name],
            self.problems,
            indices,
            self.is_right,
            run=run,
            concurrency=concurrency,
            on_answer=on_answer,
        )


def write_figures(settings: Settings, figures: Figures, seconds: float) -> None:
    """``build/demo.json``; its keys are documented in the README."""
    content = {
        "settings": {
            "problems": settings.problems,
            "accuracy_problems": settings.accuracy_problems,
            "runs": settings.runs,
            "concurrency": settings.concurrency,
        },
        "machine": {
            "cpus": os.cpu_count(),
            "architecture": platform.machine(),
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("sglang", "torch")},
        },
        "seconds": round(seconds, 1),
        **figures.as_json(),
    }
    settings.output.parent.mkdir(parents=True, exist_ok=True)
    settings.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _show_trace(
    settings: Settings, console: Console, traced: tuple[str, list[dict[str, Any]]]
) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(settings.pair / "target" / "tokenizer.json"))
    text, trace = traced

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=True)

    console.print(annotated_answer(pieces_of_answer(text, trace, decode)))
