"""The comparison: servers take turns run by run, then answer the task's problems for the marks.

The order turns round from run to run.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field
from functools import partial

from rich.console import Console

from sglang_parse.bench.compare.figures import make_comparison
from sglang_parse.bench.compare.page import render
from sglang_parse.bench.compare.report import conditions, results
from sglang_parse.bench.compare.serving import Load, bench, command_of
from sglang_parse.bench.compare.settings import DEMO_TASK, OWN_THRESHOLD, CompareSettings
from sglang_parse.bench.compare.show import show_figures
from sglang_parse.bench.harness.ask import MAX_TOKENS, Asking
from sglang_parse.bench.harness.lineup import lineup
from sglang_parse.bench.harness.match import Assignment, Match
from sglang_parse.bench.harness.pool import Pool
from sglang_parse.bench.harness.program import Teller, write_json
from sglang_parse.bench.harness.records import PLAIN, TITLES, WITH_PARSE, Leg, ServingRun, Way
from sglang_parse.bench.harness.servers import ENVIRONMENT, MAX_RUNNING_REQUESTS, Endpoint
from sglang_parse.bench.tasks import find_task
from sglang_parse.bench.tasks.demo import demo_assignment

REQUEST_LIMIT_S = 1800.0


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Measure, write results.json and report.html, print a table.

    Raises:
        BenchError: a server or a request failed.
        TaskError: the task's file or its grader is not there.
    """
    settings, say = CompareSettings.read(arguments), Teller(console)
    task = assignment(settings)
    specs = lineup(settings.models, settings.own_servers)
    has_goals = settings.is_demo_pair()
    if specs:
        # What is started here is on disk, and so is its tokenizer: nobody waits for a network.
        os.environ.update(ENVIRONMENT)
    with Pool(
        specs,
        settings.output / "logs",
        remotes=settings.remotes,
        max_alive=settings.max_alive,
        on_start=lambda name: say(f"start {TITLES[name]}"),
    ) as pool:
        match = Match(pool, task, partial(asking_of, settings, task))
        comparing = _Comparing(settings, match, say)
        comparing.play_timed()
        comparing.play_for_marks()
    timed, looks, marks = comparing.timed, comparing.looks, comparing.marks
    figures = make_comparison(
        settings.all_ways(), timed, looks, marks, OWN_THRESHOLD, has_goals=has_goals
    )
    command = command_of(comparing.load(Way(PLAIN), 0, 1))
    facts = conditions(settings, specs, task.title, command, say.seconds)
    write_json(settings.output / "results.json", results(figures, timed, marks, facts), indent=1)
    (settings.output / "report.html").write_text(render(figures, facts), encoding="utf-8")
    show_figures(console, figures, settings.output)
    return 0


def assignment(settings: CompareSettings) -> Assignment:
    """The task as it is asked here. Raises: TaskError, when its file or grader is not there."""
    if settings.task == DEMO_TASK:
        timed = settings.runs * sum(map(settings.num_requests, settings.concurrencies))
        return demo_assignment(max(settings.problems, timed), settings.max_tokens or MAX_TOKENS)
    task = find_task(settings.task)
    items = task.read(settings.task_file)
    title = f"{task.title} ({task.note})" if task.note else task.title
    grade = task.make_grader(settings.options)
    return Assignment(title, items, grade, settings.max_tokens or task.max_tokens)


def asking_of(settings: CompareSettings, task: Assignment, way: Way) -> Asking:
    """What all requests of a way share."""
    return Asking(
        model=settings.model_name,
        max_tokens=task.max_tokens,
        custom_params=way.custom_params,
        limit_s=REQUEST_LIMIT_S,
    )


@dataclass(frozen=True, slots=True)
class _Comparing:
    """What the servers are asked, and what they brought back."""

    settings: CompareSettings
    match: Match
    say: Teller
    timed: list[ServingRun] = field(default_factory=list)
    looks: list[Leg] = field(default_factory=list)
    marks: list[Leg] = field(default_factory=list)

    def play_timed(self) -> None:
        """Every run: each server in turn, at every concurrency, then its other thresholds."""
        for run, endpoint in self.match.turns(self.settings.runs, self.settings.order):
            self.say(f"run {run + 1} of {self.settings.runs}: {TITLES[endpoint.name]}")
            self._turn(endpoint, run)

    def _turn(self, endpoint: Endpoint, run: int) -> None:
        own, *others = self.settings.ways(endpoint.name)
        self.match.ask(endpoint, own, range(1))  # a server's first answers are its slowest
        for concurrency in self.settings.concurrencies:
            self._time(endpoint, own, run, concurrency)
        for way in others:
            self._time(endpoint, way, run, 1)
        if endpoint.name in WITH_PARSE:
            indices = self._indices(run, 1)[: self.settings.looks]
            for way in (own, *others):
                self.looks.append(self.match.ask(endpoint, way, indices, run=run))

    def _time(self, endpoint: Endpoint, way: Way, run: int, concurrency: int) -> None:
        folder = self.settings.output / "bench_serving"
        load = self.load(way, run, concurrency)
        self.timed.append(bench(endpoint, way, run, load, folder))
        rate = self.timed[-1].tokens_per_s
        self.say(f"  {way.label}, {concurrency} at a time: {rate:.0f} tokens/s")

    def load(self, way: Way, run: int, concurrency: int) -> Load:
        """What one run of ``bench_serving`` sends."""
        return Load(
            problems=[self.match.task.items[i] for i in self._indices(run, concurrency)],
            concurrency=concurrency,
            tokenizer=self.settings.tokenizer,
            asking=self.match.asking(way),
            seed=self.settings.seed,
        )

    def _indices(self, run: int, concurrency: int) -> list[int]:
        """Other problems for every run and concurrency, as far as the task has them."""
        counts = {c: self.settings.num_requests(c) for c in self.settings.concurrencies}
        before = sum(count for c, count in counts.items() if c < concurrency)
        start = run * sum(counts.values()) + before
        total = len(self.match.task.items)
        return [index % total for index in range(start, start + counts[concurrency])]

    def play_for_marks(self) -> None:
        """The task's problems to every server, as many servers at once as may live."""
        servers, width = self.settings.servers, self.settings.max_alive
        for group in (servers[k : k + width] for k in range(0, len(servers), width)):
            self.say(f"answers for the marks: {', '.join(TITLES[name] for name in group)}")
            self.marks.extend(self.match.all_at_once(group, self._answers))

    def _answers(self, endpoint: Endpoint) -> list[Leg]:
        """Every way's; the plain target answers twice, for the noise."""
        own, *others = self.settings.ways(endpoint.name)
        count = min(self.settings.problems, len(self.match.task.items))
        legs = [(own, 0, count), *((way, 0, self.settings.sweep_problems) for way in others)]
        if endpoint.name == PLAIN:
            legs.append((own, 1, count))
        return [self._answered(endpoint, way, run, min(number, count)) for way, run, number in legs]

    def _answered(self, endpoint: Endpoint, way: Way, run: int, count: int) -> Leg:
        return self.match.ask(
            endpoint, way, range(count), run=run, concurrency=MAX_RUNNING_REQUESTS
        )
