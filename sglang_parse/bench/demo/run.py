"""The demo: three servers, the same held-out problems, one table, one answer looked at closely.

The servers take turns run by run, so that a machine busy with something else slows all of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from sglang_parse.bench.demo.figures import make_figures
from sglang_parse.bench.demo.load import IsRight, run_together, send_problems, trace_answer
from sglang_parse.bench.demo.records import DRAFT, PARSE, PLAIN, TITLES, DemoError, Leg, Problem
from sglang_parse.bench.demo.report import write_report
from sglang_parse.bench.demo.servers import (
    MAX_RUNNING_REQUESTS,
    Server,
    ServerSpec,
    awake,
    servers,
)
from sglang_parse.bench.demo.settings import DEMO_PAIR, Settings
from sglang_parse.bench.demo.show import (
    annotated_answer,
    figures_table,
    pieces_of_answer,
    show_checks,
)

NAMES = (PLAIN, PARSE, DRAFT)
MAX_TRACES = 5


def main(arguments: argparse.Namespace) -> int:
    """Exit code: 0 when every figure was measured, even one that misses its mark; 1 otherwise."""
    try:
        run_demo(Settings.read(arguments), Console())
    except DemoError as error:
        print(f"sglang-parse demo: {error}", file=sys.stderr)
        return 1
    return 0


def run_demo(settings: Settings, console: Console) -> None:
    """Raises: DemoError."""
    started = time.monotonic()
    module = load_problems()
    problems = module.held_out_problems(settings.total_problems)
    logs = settings.output.parent / "demo-logs"
    with make_progress(console) as progress:
        task = _add_task(progress, "starting three servers", len(NAMES))
        with servers(specs(settings.pair), logs, lambda: progress.advance(task)) as running:
            stage = _Stage(settings, running, problems, module.is_answer_right, progress)
            stage.warm_up()
            legs = stage.timed_legs() + stage.accuracy_legs()
            trace = stage.trace_of_a_cut_draft(legs)
    figures = make_figures(legs, settings.concurrency)
    write_report(settings, figures, time.monotonic() - started)
    console.print(figures_table(figures, settings.concurrency))
    show_checks(console, figures.checks)
    console.print(f"the same figures: {settings.output}\n")
    _show_trace(settings, console, trace)


def make_progress(console: Console) -> Progress:
    """Bars with a title, a count and the time so far."""
    return Progress(
        TextColumn("{task.description:<34}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def _add_task(progress: Progress, title: str, total: int) -> TaskID:
    # Bars are drawn once, at the end, where the output is no terminal: there, say what is going on.
    if not progress.console.is_terminal:
        progress.console.print(f"{title} ...")
    return progress.add_task(title, total=total)


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
                task = _add_task(self.progress, title, len(one) + len(many))
                with awake(self.running[name]):
                    legs.append(self._leg(name, one, run, 1, task))
                    legs.append(self._leg(name, many, run, self.settings.concurrency, task))
        return legs

    def accuracy_legs(self) -> list[Leg]:
        """The remaining problems, to all servers at once: only the answers count."""
        rest = range(self.settings.problems, self.settings.total_problems)
        if not rest:
            return []
        task = _add_task(self.progress, "accuracy: all three at once", len(NAMES) * len(rest))
        calls = [partial(self._leg, name, rest, -1, MAX_RUNNING_REQUESTS, task) for name in NAMES]
        with awake(*self.running.values()):
            return run_together(calls, len(NAMES))

    def trace_of_a_cut_draft(self, legs: Sequence[Leg]) -> tuple[str, list[dict[str, Any]]]:
        """Text and trace of an answer whose draft was cut, of any answer if none was.

        Answers that were right in the end come first (there the target saved them), then those
        of few rounds, which are easy to follow.
        """
        answers = [answer for leg in legs if leg.server == PARSE for answer in leg.answers]
        cut = [a for a in answers if a.parse["accepted_tokens"] < a.parse["drafted_tokens"]]
        chosen = (
            sorted(cut, key=lambda a: (not a.is_right, a.parse["rounds"]))[:MAX_TRACES]
            or answers[:1]
        )
        with awake(self.running[PARSE]):
            for answer in chosen:
                text, info = trace_answer(self.running[PARSE], self.problems[answer.problem])
                trace = info["trace"]
                if any(record["cut"] < max(record["prefix_ends"], default=0) for record in trace):
                    break
        return text, trace

    def _leg(
        self, name: str, indices: Sequence[int], run: int, concurrency: int, task: TaskID | None
    ) -> Leg:
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


def _show_trace(
    settings: Settings, console: Console, traced: tuple[str, list[dict[str, Any]]]
) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(settings.pair / "target" / "tokenizer.json"))
    text, trace = traced

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=True)

    console.print(annotated_answer(pieces_of_answer(text, trace, decode)))
