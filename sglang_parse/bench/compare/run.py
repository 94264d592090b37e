"""The comparison: servers take turns run by run, then answer the task's problems for the marks.

Run k sends every server the same problems, minutes apart; the order turns round from run to run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from rich.console import Console

from sglang_parse.bench.compare.conditions import conditions
from sglang_parse.bench.compare.drive import Load, bench, command_of
from sglang_parse.bench.compare.figures import make_figures
from sglang_parse.bench.compare.lineup import PLAIN, TITLES, WITH_PARSE, label, lineup
from sglang_parse.bench.compare.page import write_page
from sglang_parse.bench.compare.pool import Pool
from sglang_parse.bench.compare.records import CompareError, Look, Marks, Timed, Way
from sglang_parse.bench.compare.results import results, write_results
from sglang_parse.bench.compare.settings import DEMO_TASK, OWN_THRESHOLD, Settings
from sglang_parse.bench.compare.show import show_figures
from sglang_parse.bench.demo.load import Asking, Endpoint, Reply, ask_all, run_together
from sglang_parse.bench.demo.servers import (
    ENVIRONMENT,
    MAX_RUNNING_REQUESTS,
    StartProcess,
    start_process,
)
from sglang_parse.bench.tasks import Grader, Item, TaskError, find_task
from sglang_parse.bench.tasks.demo import demo_items

REQUEST_LIMIT_S = 1800.0
DEMO_TOKENS = 256


def main(arguments: argparse.Namespace) -> int:
    """Exit code: 0 when everything was measured, figures that miss their mark too; 1 otherwise."""
    try:
        run_compare(Settings.read(arguments), Console())
    except (CompareError, TaskError) as error:
        print(f"sglang-parse compare: {error}", file=sys.stderr)
        return 1
    return 0


def run_compare(settings: Settings, console: Console, start: StartProcess = start_process) -> None:
    """Measure, write results.json and report.html, print a table.

    Args:
        start: how a server's first process is started.

    Raises:
        CompareError: a server or a request failed.
        TaskError: the task's file or its grader is not there.
    """
    started = time.monotonic()
    task = Assignment.of(settings)
    specs = lineup(settings.models, settings.own_servers)
    if specs:
        # What is started here is on disk, and so is its tokenizer: nobody waits for a network.
        os.environ.update(ENVIRONMENT)

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - started:5.0f} s  {text}", markup=False, highlight=False)

    pool = Pool(
        specs,
        settings.remotes,
        settings.output / "logs",
        settings.max_alive,
        on_start=lambda name: say(f"start {TITLES[name]}"),
        start=start,
    )
    match = Match(settings, task, pool, say)
    try:
        match.play_timed()
        match.play_for_marks()
    finally:
        pool.stop()
    figures = make_figures(
        settings.all_ways(), match.timed, match.looks, match.marks, OWN_THRESHOLD
    )
    command = command_of(match.load(Way(PLAIN), 0, 1))
    facts = conditions(settings, specs, task.title, command, time.monotonic() - started)
    write_results(
        settings.output / "results.json", results(figures, match.timed, match.marks, facts)
    )
    write_page(settings.output / "report.html", figures, facts)
    show_figures(console, figures, settings)


@dataclass(frozen=True, slots=True)
class Assignment:
    """The task as it is asked here.

    ``title`` is for the page, with what a reader must know.
    """

    title: str
    items: Sequence[Item]
    grade: Grader
    max_tokens: int

    @classmethod
    def of(cls, settings: Settings) -> Assignment:
        """Raises: TaskError, when its file or its grader is not there."""
        if settings.task == DEMO_TASK:
            timed = settings.runs * sum(map(settings.num_requests, settings.concurrencies))
            items, grade = demo_items(max(settings.problems, timed))
            title = "held-out problems of the demo pair"
            return cls(title, items, grade, settings.max_tokens or DEMO_TOKENS)
        task = find_task(settings.task)
        items = task.read(settings.task_file)
        title = f"{task.title} ({task.note})" if task.note else task.title
        grade = task.make_grader(settings.options)
        return cls(title, items, grade, settings.max_tokens or task.max_tokens)


@dataclass(slots=True)
class Match:
    """Who plays when, and what they brought back."""

    settings: Settings
    task: Assignment
    pool: Pool
    say: Callable[[str], None]
    timed: list[Timed] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    marks: list[Marks] = field(default_factory=list)

    def play_timed(self) -> None:
        """Every run: each server in turn, at every concurrency, then its other thresholds."""
        for run in range(self.settings.runs):
            for server in self.settings.order(run):
                with self.pool.awake(server) as (endpoint,):
                    self.say(f"run {run + 1} of {self.settings.runs}: {TITLES[server]}")
                    self._turn(endpoint, run)

    def _turn(self, endpoint: Endpoint, run: int) -> None:
        own, *others = self.settings.ways(endpoint.name)
        self._ask(endpoint, own, range(1), 1)  # a server's first answers are its slowest
        for concurrency in self.settings.concurrencies:
            self._time(endpoint, own, run, concurrency)
        for way in others:
            self._time(endpoint, way, run, 1)
        if endpoint.name in WITH_PARSE:
            for way in (own, *others):
                indices = self._indices(run, 1)[: self.settings.looks]
                self.looks.append(Look(way, run, tuple(self._ask(endpoint, way, indices, 1))))

    def _time(self, endpoint: Endpoint, way: Way, run: int, concurrency: int) -> None:
        folder = self.settings.output / "bench_serving"
        load = self.load(way, run, concurrency)
        self.timed.append(bench(endpoint, way, run, load, folder))
        rate = self.timed[-1].tokens_per_s
        self.say(f"  {label(way)}, {concurrency} at a time: {rate:.0f} tokens/s")

    def load(self, way: Way, run: int, concurrency: int) -> Load:
        """What one run of ``bench_serving`` sends."""
        return Load(
            problems=[self.task.items[index] for index in self._indices(run, concurrency)],
            concurrency=concurrency,
            tokenizer=self.settings.tokenizer,
            asking=self._asking(way),
            seed=self.settings.seed,
        )

    def _indices(self, run: int, concurrency: int) -> list[int]:
        """Other problems for every run and concurrency, as far as the task has them."""
        counts = {c: self.settings.num_requests(c) for c in self.settings.concurrencies}
        before = sum(count for c, count in counts.items() if c < concurrency)
        start = run * sum(counts.values()) + before
        return [index % len(self.task.items) for index in range(start, start + counts[concurrency])]

    def play_for_marks(self) -> None:
        """The task's problems to every server, as many servers at once as may live."""
        servers, width = self.settings.servers, self.settings.max_alive
        for group in (servers[k : k + width] for k in range(0, len(servers), width)):
            with self.pool.awake(*group) as endpoints:
                self.say(f"answers for the marks: {', '.join(TITLES[name] for name in group)}")
                calls = [partial(self._marked_replies, endpoint) for endpoint in endpoints]
                for replies in run_together(calls, len(calls)):
                    self.marks += [self._graded(*answered) for answered in replies]

    def _marked_replies(self, endpoint: Endpoint) -> list[tuple[Way, int, list[Reply]]]:
        """(Way, repeat, replies); the plain target answers twice, for the noise."""
        own, *others = self.settings.ways(endpoint.name)
        count = min(self.settings.problems, len(self.task.items))
        legs = [(own, 0, count), *((way, 0, self.settings.sweep_problems) for way in others)]
        if endpoint.name == PLAIN:
            legs.append((own, 1, count))
        return [
            (way, repeat, self._ask(endpoint, way, range(min(number, count)), MAX_RUNNING_REQUESTS))
            for way, repeat, number in legs
        ]

    def _graded(self, way: Way, repeat: int, replies: list[Reply]) -> Marks:
        # Here and not where the answers arrive: graders set alarms, which only the main thread may.
        scores = [self.task.grade(self.task.items[reply.problem], reply.texts) for reply in replies]
        return Marks(way, repeat, tuple(scores), tuple(replies))

    def _ask(
        self, endpoint: Endpoint, way: Way, indices: Sequence[int], concurrency: int
    ) -> list[Reply]:
        asking = self._asking(way)
        _, replies = ask_all(endpoint, self.task.items, indices, concurrency, asking=asking)
        if endpoint.name in WITH_PARSE:
            for reply in replies:
                check_served(endpoint.name, reply)
        return replies

    def _asking(self, way: Way) -> Asking:
        return Asking(
            model=self.settings.model_name,
            max_tokens=self.task.max_tokens,
            custom_params=way.custom_params,
            limit_s=REQUEST_LIMIT_S,
        )


def check_served(name: str, reply: Reply) -> None:
    """Raises: CompareError, when a server that stands for PARSE did not use it."""
    if reply.parse.get("mode") != "parse":
        raise CompareError(
            f"{TITLES[name]} did not serve problem {reply.problem} with PARSE: "
            f"meta_info['parse'] is {reply.parse!r}"
        )
