"""The comparison: any line-up of servers in a match timed by SGLang's ``bench_serving``.

The order turns round from run to run.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial

from rich.console import Console

from sglang_parse.client.ask import Asking
from sglang_parse.client.match import Match, Part, Preset, Watcher
from sglang_parse.client.pool import Pool
from sglang_parse.client.program import Teller, write_json
from sglang_parse.client.records import PLAIN, TITLES, WITH_PARSE, Assignment, ServingRun, Variant
from sglang_parse.client.servers import ENVIRONMENT, MAX_RUNNING_REQUESTS, Endpoint
from sglang_parse.client.targets import server_specs
from sglang_parse.compare.figures import make_comparison
from sglang_parse.compare.page import render
from sglang_parse.compare.report import conditions, results
from sglang_parse.compare.serving import Load, bench, command_of
from sglang_parse.compare.settings import OWN_THRESHOLD, CompareSettings
from sglang_parse.compare.show import show_figures
from sglang_parse.tasks import make_assignment

REQUEST_LIMIT_S = 1800.0


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Measure, write results.json and report.html, print a table.

    Raises:
        BenchError: a server or a request failed.
        TaskError: the task's file or its grader is not there.
    """
    settings, say = CompareSettings.read(arguments), Teller(console)
    task = assignment(settings)
    specs = server_specs(settings.models, settings.own_servers)
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
        played = match.play(preset(settings, match), _Lines(settings, say))
    figures = make_comparison(
        settings.all_ways(),
        played.timed,
        played.looks,
        played.marks,
        OWN_THRESHOLD,
        has_goals=has_goals,
    )
    first = Part(Variant(PLAIN), settings.indices(0, 1, len(task.items)))
    command = command_of(load(settings, match, first))
    facts = conditions(settings, specs, task.title, command, say.seconds)
    content = results(figures, played.timed, played.marks, facts)
    write_json(settings.output / "results.json", content, indent=1)
    (settings.output / "report.html").write_text(render(figures, facts), encoding="utf-8")
    show_figures(console, figures, settings.output)
    return 0


def assignment(settings: CompareSettings) -> Assignment:
    """The task as it is asked here. Raises: TaskError, when its file or grader is not there."""
    timed = settings.runs * sum(map(settings.num_requests, settings.concurrencies))
    count = max(settings.problems, timed)
    return make_assignment(
        settings.task, settings.task_file, count, settings.max_tokens, settings.options
    )


def asking_of(settings: CompareSettings, task: Assignment, way: Variant) -> Asking:
    """What all requests of a way share."""
    return Asking(
        model=settings.model_name,
        max_tokens=task.max_tokens,
        custom_params=way.custom_params,
        limit_s=REQUEST_LIMIT_S,
    )


def preset(settings: CompareSettings, match: Match) -> Preset[ServingRun]:
    """The comparison's match: SGLang's own clock, with a look beside it where PARSE runs."""
    total = len(match.task.items)

    def timed(server: str, run: int) -> list[Part]:
        """At every concurrency, then the other thresholds one at a time."""
        own, *others = settings.ways(server)
        ways = [(own, concurrency) for concurrency in settings.concurrencies]
        ways += [(way, 1) for way in others]
        return [Part(way, settings.indices(run, c, total), run, c) for way, c in ways]

    def clock(endpoint: Endpoint, part: Part) -> ServingRun:
        folder = settings.output / "bench_serving"
        return bench(endpoint, part.variant, part.run, load(settings, match, part), folder)

    def looks(server: str, run: int) -> list[Part]:
        if server not in WITH_PARSE:
            return []
        indices = settings.indices(run, 1, total)[: settings.looks]
        return [Part(way, indices, run) for way in settings.ways(server)]

    def marks(server: str) -> list[Part]:
        """Every way's answers; the plain target answers twice, for the noise."""
        own, *others = settings.ways(server)
        count = min(settings.problems, total)
        asked = [(own, 0, count), *((way, 0, settings.sweep_problems) for way in others)]
        if server == PLAIN:
            asked.append((own, 1, count))
        return [
            Part(way, range(min(number, count)), run, MAX_RUNNING_REQUESTS)
            for way, run, number in asked
        ]

    return Preset(
        runs=settings.runs,
        order=settings.order,
        timed=timed,
        clock=clock,
        looks=looks,
        marks=marks,
        width=settings.max_alive,
    )


def load(settings: CompareSettings, match: Match, part: Part) -> Load:
    """What one run of ``bench_serving`` sends."""
    return Load(
        problems=[match.task.items[index] for index in part.indices],
        concurrency=part.concurrency,
        tokenizer=settings.tokenizer,
        asking=match.asking(part.variant),
        seed=settings.seed,
    )


class _Lines(Watcher[ServingRun]):
    """A line per turn and per figure."""

    def __init__(self, settings: CompareSettings, say: Teller) -> None:
        self._runs, self._say = settings.runs, say

    def turn(self, server: str, run: int, parts: Sequence[Part]) -> None:
        del parts
        self._say(f"run {run + 1} of {self._runs}: {TITLES[server]}")

    def timed(self, found: ServingRun) -> None:
        at = f"{found.variant.label}, {found.concurrency} at a time"
        self._say(f"  {at}: {found.tokens_per_s:.0f} tokens/s")

    def marks(self, parts: dict[str, Sequence[Part]]) -> None:
        self._say(f"answers for the marks: {', '.join(TITLES[name] for name in parts)}")
