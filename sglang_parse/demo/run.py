"""The demo: three servers, the same held-out problems, one table, one answer looked at closely."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import chain

from rich.console import Console
from rich.progress import Progress, TaskID

from sglang_parse.client.ask import Asking, trace_answers
from sglang_parse.client.demo_pair import demo_models, demo_tokenizer
from sglang_parse.client.match import Match, Part, Preset, Watcher
from sglang_parse.client.pool import Pool
from sglang_parse.client.program import Teller, write_json
from sglang_parse.client.records import DRAFT, PARSE, PLAIN, TITLES, BenchRun, Variant
from sglang_parse.client.servers import MAX_RUNNING_REQUESTS, Endpoint
from sglang_parse.client.tables import add_bar, make_progress, show_goals
from sglang_parse.client.targets import server_specs
from sglang_parse.client.traced import Traced, answer_table, take_apart
from sglang_parse.demo.figures import make_figures
from sglang_parse.demo.report import report
from sglang_parse.demo.settings import DemoSettings
from sglang_parse.demo.show import figures_table
from sglang_parse.tasks.demo import demo_assignment

NAMES = (PLAIN, PARSE, DRAFT)
MAX_TRACES = 5


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Measure, print the table, write the JSON file. Raises: BenchError."""
    settings, say = DemoSettings.read(arguments), Teller(console)
    task = demo_assignment(settings.total_problems)
    specs = server_specs(demo_models(settings.pair), NAMES)
    with (
        make_progress(console) as progress,
        Pool(specs, settings.output.parent / "demo-logs") as pool,
    ):
        bar = add_bar(progress, "starting three servers", len(NAMES))
        pool.start_all(lambda: progress.advance(bar))
        match, bars = Match(pool, task, lambda _: Asking()), _Bars(settings, progress)
        played = match.play(preset(settings, match, bars), bars)
        legs = played.timed + played.marks
        trace = trace_of_a_cut_draft(match, legs)
    figures = make_figures(legs, settings.concurrency)
    write_json(settings.output, report(settings, figures, say.seconds))
    console.print(figures_table(figures, settings.concurrency))
    show_goals(console, figures.checks)
    console.print(f"the same figures: {settings.output}\n")
    _show_trace(settings, console, trace)
    return 0


def preset(settings: DemoSettings, match: Match, bars: Watcher[BenchRun]) -> Preset[BenchRun]:
    """The demo's match: our own clock, and every answer graded, the timed ones too."""
    parts = settings.parts()
    rest = range(settings.problems, settings.total_problems)

    def timed(server: str, run: int) -> list[Part]:
        one, many = parts[run]
        return [
            Part(Variant(server), one, run),
            Part(Variant(server), many, run, settings.concurrency),
        ]

    def clock(endpoint: Endpoint, part: Part) -> BenchRun:
        return match.graded(match.ask(endpoint, part, on_answer=bars.answered))

    def marks(server: str) -> list[Part]:
        return [Part(Variant(server), rest, concurrency=MAX_RUNNING_REQUESTS)] if rest else []

    return Preset(
        runs=len(parts),
        order=lambda _: NAMES,
        timed=timed,
        clock=clock,
        marks=marks,
        width=len(NAMES),
    )


class _Bars(Watcher[BenchRun]):
    """One bar per turn, and one for the answers that only count."""

    def __init__(self, settings: DemoSettings, progress: Progress) -> None:
        self._runs, self._progress = settings.runs, progress
        self._bar: TaskID | None = None

    def turn(self, server: str, run: int, parts: Sequence[Part]) -> None:
        self._begin(f"run {run + 1}/{self._runs}: {TITLES[server]}", parts)

    def marks(self, parts: dict[str, Sequence[Part]]) -> None:
        self._begin("accuracy: all three at once", list(chain.from_iterable(parts.values())))

    def answered(self) -> None:
        if self._bar is not None:
            self._progress.advance(self._bar)

    def _begin(self, title: str, parts: Sequence[Part]) -> None:
        self._bar = add_bar(self._progress, title, sum(len(part.indices) for part in parts))


def trace_of_a_cut_draft(match: Match, legs: Sequence[BenchRun]) -> Traced:
    """An answer whose draft was cut, any answer if none was.

    Answers that were right in the end come first (there the target saved them), then those of few
    rounds, which are easy to follow.
    """
    answers = [answer for leg in legs if leg.variant.server == PARSE for answer in leg.answers]
    cut = [a for a in answers if a.parse["accepted_tokens"] < a.parse["drafted_tokens"]]
    chosen = sorted(cut, key=lambda a: (not a.score, a.parse["rounds"]))[:MAX_TRACES] or answers[:1]
    with match.pool.awake(PARSE) as (endpoint,):
        for answer in chosen:
            (traced,) = trace_answers(endpoint, [match.task.items[answer.problem]])
            trace = traced.parse["trace"]
            if any(
                record["accepted_len"] < max(record["prefix_ends"], default=0) for record in trace
            ):
                break
    return traced


def _show_trace(settings: DemoSettings, console: Console, traced: Traced) -> None:
    tokenizer = demo_tokenizer(settings.pair)

    def decode(texts: Sequence[Sequence[int]]) -> list[str]:
        return tokenizer.decode_batch([list(ids) for ids in texts], skip_special_tokens=True)

    console.print(answer_table(take_apart(traced, decode), "One answer as it was made"))
