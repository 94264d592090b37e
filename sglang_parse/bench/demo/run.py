"""The demo: three servers, the same held-out problems, one table, one answer looked at closely."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID

from sglang_parse.bench.demo.figures import make_figures
from sglang_parse.bench.demo.report import report
from sglang_parse.bench.demo.settings import DemoSettings
from sglang_parse.bench.demo.show import annotated_answer, figures_table, pieces_of_answer
from sglang_parse.bench.harness.ask import Asking, trace_answer
from sglang_parse.bench.harness.demo_pair import demo_models
from sglang_parse.bench.harness.lineup import lineup
from sglang_parse.bench.harness.match import Match
from sglang_parse.bench.harness.pool import Pool
from sglang_parse.bench.harness.program import Teller, write_json
from sglang_parse.bench.harness.records import DRAFT, PARSE, PLAIN, TITLES, Leg, Way
from sglang_parse.bench.harness.servers import MAX_RUNNING_REQUESTS, Endpoint
from sglang_parse.bench.harness.tables import add_bar, make_progress, show_goals
from sglang_parse.bench.tasks.demo import demo_assignment

NAMES = (PLAIN, PARSE, DRAFT)
MAX_TRACES = 5


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Measure, print the table, write the JSON file. Raises: BenchError."""
    settings, say = DemoSettings.read(arguments), Teller(console)
    task = demo_assignment(settings.total_problems)
    specs = lineup(demo_models(settings.pair), NAMES)
    with (
        make_progress(console) as progress,
        Pool(specs, settings.output.parent / "demo-logs") as pool,
    ):
        bar = add_bar(progress, "starting three servers", len(NAMES))
        pool.start_all(lambda: progress.advance(bar))
        demo = _Demo(settings, Match(pool, task, lambda _: Asking()), progress)
        demo.warm_up()
        legs = demo.timed_legs() + demo.accuracy_legs()
        trace = demo.trace_of_a_cut_draft(legs)
    figures = make_figures(legs, settings.concurrency)
    write_json(settings.output, report(settings, figures, say.seconds))
    console.print(figures_table(figures, settings.concurrency))
    show_goals(console, figures.checks)
    console.print(f"the same figures: {settings.output}\n")
    _show_trace(settings, console, trace)
    return 0


@dataclass(frozen=True, slots=True)
class _Demo:
    """What the three servers are asked, and the bars that say so."""

    settings: DemoSettings
    match: Match
    progress: Progress

    def warm_up(self) -> None:
        """A first request is slower than all others; it is not measured."""
        for _, endpoint in self.match.turns(1, lambda _: NAMES):
            self.match.ask(endpoint, Way(endpoint.name), range(1))

    def timed_legs(self) -> list[Leg]:
        parts, legs = self.settings.parts(), []
        for run, endpoint in self.match.turns(len(parts), lambda _: NAMES):
            one, many = parts[run]
            title = f"run {run + 1}/{len(parts)}: {TITLES[endpoint.name]}"
            bar = add_bar(self.progress, title, len(one) + len(many))
            for indices, concurrency in ((one, 1), (many, self.settings.concurrency)):
                leg = self._leg(endpoint, indices, bar, run=run, concurrency=concurrency)
                legs.append(self.match.graded(leg))
        return legs

    def accuracy_legs(self) -> list[Leg]:
        """The remaining problems, to all servers at once: only the answers count."""
        rest = range(self.settings.problems, self.settings.total_problems)
        if not rest:
            return []
        bar = add_bar(self.progress, "accuracy: all three at once", len(NAMES) * len(rest))

        def play(endpoint: Endpoint) -> list[Leg]:
            return [self._leg(endpoint, rest, bar, run=-1, concurrency=MAX_RUNNING_REQUESTS)]

        return self.match.all_at_once(NAMES, play)

    def trace_of_a_cut_draft(self, legs: Sequence[Leg]) -> tuple[str, list[dict[str, Any]]]:
        """Text and trace of an answer whose draft was cut, of any answer if none was.

        Answers that were right in the end come first (there the target saved them), then those
        of few rounds, which are easy to follow.
        """
        answers = [answer for leg in legs if leg.way.server == PARSE for answer in leg.answers]
        cut = [a for a in answers if a.parse["accepted_tokens"] < a.parse["drafted_tokens"]]
        chosen = (
            sorted(cut, key=lambda a: (not a.score, a.parse["rounds"]))[:MAX_TRACES] or answers[:1]
        )
        with self.match.pool.awake(PARSE) as (endpoint,):
            for answer in chosen:
                text, info = trace_answer(endpoint, self.match.task.items[answer.problem])
                trace = info["trace"]
                if any(record["cut"] < max(record["prefix_ends"], default=0) for record in trace):
                    break
        return text, trace

    def _leg(self, endpoint: Endpoint, indices: Sequence[int], bar: TaskID, **leg: Any) -> Leg:
        on_answer = partial(self.progress.advance, bar)
        return self.match.ask(endpoint, Way(endpoint.name), indices, on_answer=on_answer, **leg)


def _show_trace(
    settings: DemoSettings, console: Console, traced: tuple[str, list[dict[str, Any]]]
) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(settings.pair / "target" / "tokenizer.json"))
    text, trace = traced

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=True)

    console.print(annotated_answer(pieces_of_answer(text, trace, decode)))
