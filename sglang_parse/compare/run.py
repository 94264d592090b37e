"""The run loop: servers take turns, then answer problems that are graded.

Run k sends every server the same problems, shortly after one another, so that a machine busy with
something else slows all of them.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Sequence
from functools import cache, cached_property, partial
from pathlib import Path

from rich.console import Console
from tokenizers import Tokenizer

from sglang_parse.client.ask import LONG_LIMIT_S, Asking, ask, graded, run_together, trace_answers
from sglang_parse.client.pool import Pool
from sglang_parse.client.program import ProgressLog
from sglang_parse.client.records import (
    PARSE,
    STOCK,
    Assignment,
    BenchRun,
    Item,
    Variant,
    has_parse,
    kind_of,
    title_of,
)
from sglang_parse.client.servers import ENVIRONMENT, MAX_RUNNING_REQUESTS, Endpoint
from sglang_parse.client.tables import publish
from sglang_parse.client.targets import server_specs
from sglang_parse.client.traced import Traced, explain_answer
from sglang_parse.client.traced_table import answer_table
from sglang_parse.compare.figures import Measured, make_comparison
from sglang_parse.compare.report import TITLE, conditions, results, sections
from sglang_parse.compare.serving import Load, bench, command_of
from sglang_parse.compare.settings import CompareSettings
from sglang_parse.tasks.assignment import make_assignment

MAX_TRACES = 5
NEXT = """
Next, for your own models (sglang-parse is in .venv/bin):
  sglang-parse doctor SERVER_FLAGS      will the server work? Nothing is loaded
  sglang-parse doctor --url URL         does PARSE pay on a running server, and if not, why?
  sglang-parse explain --url URL        what is accepted and rejected, segment by segment
  sglang-parse calibrate --help         which threshold keeps the error rate you allow
"""


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Measure, write results.json and report.html, print tables."""
    settings, log = CompareSettings.read(arguments), ProgressLog(console)
    preset = getattr(arguments, "command", "compare")
    count = max(settings.problems, settings.num_timed, settings.warmup)
    task = make_assignment(settings.task_file, settings.grader, count, settings.max_tokens)
    specs = server_specs(settings, settings.own_servers)
    if specs:
        # What is started here is on disk, and so is its tokenizer: no server waits for a network.
        os.environ.update(ENVIRONMENT)
    logs, remotes = settings.output / "logs", settings.remotes
    with Pool(specs, logs, log=log, remotes=remotes, max_alive=settings.max_alive) as pool:
        runner = Runner(settings, task, pool, log)
        measured = runner.measure()
        traced = runner.traced_answer() if preset == "demo" else None
    figures = make_comparison(measured, settings.servers, settings.baseline)
    facts = conditions(settings, specs, task.title, runner.command, log.seconds)
    file, content = settings.output / "results.json", results(figures, measured, facts)
    publish(console, file, content, TITLE, sections(figures, facts, preset == "load"))
    if traced is not None:
        decode = partial(tokenizer_of(settings.tokenizer).decode_batch, skip_special_tokens=True)
        answer = explain_answer(traced, decode)
        console.print(answer_table(answer, "One answer, segment by segment"))
    if preset == "demo":
        console.print(NEXT, highlight=False, markup=False)
    return 0


class Runner:
    """Measures servers of a pool: what it sends them, in which order. ``measured`` is filled."""

    def __init__(
        self,
        settings: CompareSettings,
        task: Assignment,
        pool: Pool,
        log: ProgressLog,
        measured: Measured | None = None,
    ) -> None:
        self._settings, self._task, self._pool, self._log = settings, task, pool, log
        self.measured = measured or Measured()
        self._warm: dict[str, Endpoint] = {}
        self._timed: dict[Variant, list[BenchRun]] = defaultdict(list)

    def measure(self) -> Measured:
        """Servers take turns, and then answer problems that are graded."""
        settings = self._settings
        for run in range(settings.runs):
            if settings.fresh:
                self._pool.stop()
            if len(settings.own_servers) <= settings.max_alive:
                self._pool.start_all()  # several at once; else each when its turn comes
            for server in settings.order(run):
                self.turn(server, run)
        if settings.problems:
            for first in range(0, len(settings.servers), settings.max_alive):
                self._grade(settings.servers[first : first + settings.max_alive])
        else:
            self.measured.graded.extend(map(_joined, self._timed.values()))
        return self.measured

    def turn(self, server: str, run: int) -> None:
        """One run of a server, at all its loads."""
        self._log(f"run {run + 1} of {self._settings.runs}: {title_of(server)}")
        with self._pool.awake(server) as (endpoint,):
            self._warm_up(endpoint)
            self._time(endpoint, run)
            self._trace(endpoint, run)

    def _time(self, endpoint: Endpoint, run: int) -> None:
        settings = self._settings
        for variant, concurrency in settings.loads(endpoint.name):
            load = self.load(variant, run, concurrency)
            runs, answers = bench(endpoint, load, settings.output / "bench_serving")
            for found in runs:
                self.measured.serving.append(found)
                at = f"{found.variant.label}, {concurrency} at a time"
                self._log(f"  {at}: {found.tokens_per_s:.0f} tokens/s")
            # Of a mixed load the groups have different problems.
            if len(runs) == 1 and not settings.problems:
                timed = BenchRun(variant, run, concurrency, runs[0].seconds, tuple(answers))
                self._timed[variant].append(graded(timed, load.problems, self._task.grade))

    def _trace(self, endpoint: Endpoint, run: int) -> None:
        """Asks for answers with the counters that ``bench_serving`` does not record."""
        settings = self._settings
        # A stock server's own mean is updated every 40 steps: too seldom for runs of few requests.
        is_counted = kind_of(endpoint.name) in STOCK and not settings.has_text
        if settings.traced and (has_parse(endpoint.name) or is_counted):
            items = self._task.items
            indices = settings.indices(run, 1, len(items))[: settings.traced]
            for variant in settings.graded_variants(endpoint.name):
                traced = ask(endpoint, items, indices, variant, run, asking=self._asking)
                self.measured.traced.append(traced)

    def _warm_up(self, endpoint: Endpoint) -> None:
        """A server's first answers are its slowest; PARSE measures stage costs by them."""
        for count, at_once in self._warm_ups(endpoint):
            problems = self._first(count)
            ask(endpoint, self._task.items, problems, concurrency=at_once, asking=self._asking)
        self._warm[endpoint.name] = endpoint

    def _warm_ups(self, endpoint: Endpoint) -> list[tuple[int, int]]:
        """Requests, and how many of them at a time."""
        settings, (*_, most) = self._settings, self._settings.concurrencies
        if self._warm.get(endpoint.name) is endpoint:
            return [(1, most)]
        if settings.has_text:
            return [(settings.warmup, most)]
        # On a GPU each load has kernels of its own; runs may be too few for PARSE to adapt to it.
        least = settings.warmup if has_parse(endpoint.name) else 1
        return [(max(least, at_once), at_once) for at_once in settings.concurrencies]

    def _first(self, count: int) -> Sequence[int]:
        return range(min(count, len(self._task.items)))

    def _grade(self, names: Sequence[str]) -> None:
        """Several servers answer at the same time."""
        self._log(f"graded answers: {', '.join(map(title_of, names))}")
        items, at_once = self._task.items, MAX_RUNNING_REQUESTS

        def answer(endpoint: Endpoint) -> list[BenchRun]:
            return [
                ask(endpoint, items, self._first(count), variant, run, at_once, asking=self._asking)
                for variant, run, count in self._graded(endpoint.name)
            ]

        with self._pool.awake(*names) as endpoints:
            found = run_together([partial(answer, one) for one in endpoints], len(names))
        for one in (run for runs in found for run in runs):
            self.measured.graded.append(graded(one, items, self._task.grade))

    def _graded(self, server: str) -> list[tuple[Variant, int, int]]:
        """(Variant, run, number of problems); the baseline answers twice, for the noise."""
        settings = self._settings
        own, *others = settings.graded_variants(server)
        twice = settings.noise and server == settings.baseline
        found = [(own, run, settings.problems) for run in range(2 if twice else 1)]
        return [*found, *((variant, 0, settings.sweep_problems) for variant in others)]

    @cached_property
    def _asking(self) -> Asking:
        name, most = self._settings.model_name, self._task.max_tokens
        return Asking(model=name, max_tokens=most, limit_s=LONG_LIMIT_S)

    @property
    def command(self) -> str:
        """Of ``bench_serving``, as a reader could give it."""
        settings = self._settings
        return command_of(self.load(Variant(settings.baseline), 0, settings.concurrencies[0]))

    def load(self, variant: Variant, run: int, concurrency: int) -> Load:
        settings = self._settings
        indices = settings.indices(run, concurrency, len(self._task.items))
        problems = [self._task.items[index] for index in indices]
        return Load(
            variant=variant,
            run=run,
            concurrency=concurrency,
            problems=problems,
            max_tokens=[self._max_tokens(problem) for problem in problems],
            tokenizer=settings.tokenizer,
            asking=self._asking,
            streams=settings.has_text,
        )

    def _max_tokens(self, item: Item) -> int:
        """With simulated acceptance wrong drafts are accepted and answers may go astray: a few of
        them would decide if they were not as short as right ones."""
        most = self._task.max_tokens
        is_simulated = any("@" in server for server in self._settings.servers)
        if not is_simulated or self._settings.task_file or not self._settings.has_text:
            return most
        right = tokenizer_of(self._settings.tokenizer).encode(item.reference.solution)
        return min(most, len(right.ids) + 1)

    def traced_answer(self) -> Traced | None:
        """A PARSE answer whose draft was rejected in part, any answer if none was.

        Right answers come first (the target corrected them), then those of few rounds, which are
        easy to follow.
        """
        runs = (run for run in self.measured.traced if run.variant == Variant(PARSE))
        items, grade = self._task.items, self._task.grade
        own = [answer for run in runs for answer in graded(run, items, grade).answers]
        if not own:
            return None
        rejected = [a for a in own if a.parse["accepted_tokens"] < a.parse["drafted_tokens"]]
        chosen = sorted(rejected, key=lambda a: (not a.score, a.parse["rounds"]))[:MAX_TRACES]
        with self._pool.awake(PARSE) as (endpoint,):
            for answer in chosen or own[:1]:
                (traced,) = trace_answers(endpoint, [items[answer.problem]], self._asking)
                if any(
                    record["accepted_len"] < max(record["prefix_ends"], default=0)
                    for record in traced.parse["trace"]
                ):
                    break
        return traced


def _joined(runs: Sequence[BenchRun]) -> BenchRun:
    """A variant's timed answers as one run, in the same order as any other variant's."""
    in_order = sorted(runs, key=lambda run: (run.concurrency, run.run))
    answers = tuple(answer for run in in_order for answer in run.answers)
    return BenchRun(in_order[0].variant, 0, 0, sum(run.seconds for run in runs), answers)


@cache
def tokenizer_of(folder: str) -> Tokenizer:
    return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
