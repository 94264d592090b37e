"""A calibration: pilot, calibration set, then a check by whole answers to other problems."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rich.console import Console
from rich.progress import Progress

from sglang_parse.calibrate import figures as f
from sglang_parse.calibrate.certify import (
    Proportion,
    errors_allowed,
    fewest_requests,
    make_grid,
)
from sglang_parse.calibrate.collect import Collector, Store
from sglang_parse.calibrate.first_draft import ANSWER, TOKEN, FirstDraft, Loss
from sglang_parse.calibrate.page import render
from sglang_parse.calibrate.report import content, show
from sglang_parse.calibrate.settings import CalibrateSettings
from sglang_parse.client.ask import Asking
from sglang_parse.client.conditions import date, machine, versions
from sglang_parse.client.pool import Pool
from sglang_parse.client.program import ProgressLog, write_json
from sglang_parse.client.records import PARSE, PLAIN, TITLES, Assignment, BenchError
from sglang_parse.client.servers import ENVIRONMENT
from sglang_parse.client.tables import add_bar, make_progress
from sglang_parse.client.targets import command_of, server_specs
from sglang_parse.core.certificate import Certificate, Fingerprint, spread_out
from sglang_parse.tasks import make_assignment

REQUEST_LIMIT_S = 1800.0


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Calibrates; writes calibration.json and report.html, prints tables.

    Raises:
        BenchError: a server or a request failed.
    """
    settings, log = CalibrateSettings.read(arguments), ProgressLog(console)
    loss, task = with_loss(_load_task(settings), settings.loss)
    log(_requirement(settings))
    specs = [] if settings.remote else server_specs(settings.models, (PARSE,))
    os.environ.update(ENVIRONMENT if specs else {})
    with (
        Pool(
            *(specs, settings.output / "logs"),
            remotes={PARSE: settings.remote} if settings.remote else None,
            on_start=lambda name: log(f"start {TITLES[name]}"),
        ) as pool,
        pool.awake(PARSE) as (endpoint,),
        make_progress(console) as progress,
    ):
        asking = Asking(settings.model_name, max_tokens=task.max_tokens, limit_s=REQUEST_LIMIT_S)
        collector = Collector(endpoint, task, asking, _decoder(settings), settings.concurrency)
        figures, certificate = _calibrate(settings, loss, collector, progress)
    conditions = {
        "date": date(),
        "minutes": round(log.seconds / 60, 1),
        "machine": machine(),
        "versions": versions(("scipy",)),
        "server": settings.remote.url if settings.remote else command_of(specs[0]),
        "max_tokens": task.max_tokens,
        **{name: getattr(settings, name) for name in ("pilot", "served", "concurrency")},
    }
    file, page = settings.output / "calibration.json", settings.output / "report.html"
    write_json(file, content(figures, certificate, conditions))
    page.write_text(render(figures, certificate, conditions), encoding="utf-8")
    show(console, figures, certificate)
    if certificate.threshold is not None:
        console.print(f"serve with it: --parse-threshold {file}", highlight=False)
    console.print(f"{file}\n{page}", highlight=False)
    return 0


def _load_task(settings: CalibrateSettings) -> Assignment:
    """Loads as many different problems as the three sets need. Raises: BenchError."""
    wanted = (settings.task_file, settings.grader, settings.total)
    task = make_assignment(*wanted, settings.max_tokens)
    if len(task.items) < settings.total:
        raise BenchError(
            f"{task.title} has {len(task.items)} problems; --pilot {settings.pilot}, --requests "
            f"{settings.requests} and --served {settings.served} need {settings.total} different "
            "ones"
        )
    return task


def with_loss(task: Assignment, wanted: Loss | None) -> tuple[Loss, Assignment]:
    """Chooses the loss; the task is returned without a locator where the loss needs none.

    Raises:
        BenchError: the loss needs a locator and the task has none.
    """
    loss: Loss = wanted or (TOKEN if task.locate else ANSWER)
    if loss == ANSWER:
        return loss, replace(task, locate=None)
    if task.locate is None:
        raise BenchError(f"--loss is {loss!r}, but {task.title} cannot say where a text goes wrong")
    return loss, task


def _requirement(settings: CalibrateSettings) -> str:
    alpha, delta = settings.levels
    allowed = errors_allowed(settings.requests, alpha, delta)
    if allowed >= 0:
        return f"a threshold passes with at most {allowed} errors in {settings.requests} requests"
    return (
        f"{settings.requests} requests certify nothing at alpha {alpha:g} and delta {delta:g}, "
        f"even without an error: {fewest_requests(alpha, delta)} or more can"
    )


@dataclass(frozen=True, slots=True)
class _Requests:
    """The three sets of requests of one calibration; results on disk are not requested again."""

    settings: CalibrateSettings
    collector: Collector
    progress: Progress
    server: Fingerprint

    def drafts(self) -> list[FirstDraft]:
        """Returns the first drafts of the pilot and the calibration set."""
        # A first draft ends within its budget; later tokens are not needed.
        asking = self.collector.asking
        limit = min(asking.max_tokens, self.server.draft_tokens + 2)
        collector = replace(self.collector, asking=replace(asking, max_tokens=limit))
        indices = range(self.settings.pilot + self.settings.requests)
        bar = self._bar("first drafts", len(indices))
        return collector.first_drafts(indices, self._store("drafts"), bar)

    def answers(self, threshold: float | None) -> list[f.GradedAnswer]:
        """Returns the graded answers to the check's problems; None: by plain decoding."""
        variant = PLAIN if threshold is None else f"{self.server.selection} at {threshold:g}"
        indices = range(self.settings.total - self.settings.served, self.settings.total)
        bar, store = self._bar(f"answers: {variant}", len(indices)), self._store("answers")
        return self.collector.graded_answers(indices, variant, threshold, store, bar)

    def _store(self, name: str) -> Store:
        task = self.collector.task
        conditions = {
            **self.server.model_dump(),
            "selection": "any",  # first drafts and plain answers do not depend on it
            "task": task.title,
            "max_tokens": task.max_tokens,
            "task_file": str(self.settings.task_file or ""),
            "located": task.locate is not None,
        }
        return Store(self.settings.output / f"{name}.jsonl", conditions)

    def _bar(self, title: str, total: int) -> Callable[[int], None]:
        return partial(self.progress.advance, add_bar(self.progress, title, total))


def _calibrate(
    settings: CalibrateSettings, loss: Loss, collector: Collector, progress: Progress
) -> tuple[f.Calibration, Certificate]:
    found = collector.fingerprint()
    requests = _Requests(settings, collector, progress, found)
    drafts = requests.drafts()
    pilot, drafts = drafts[: settings.pilot], drafts[settings.pilot :]
    grid = make_grid((v for draft in pilot for v in draft.verdicts), settings.grid)
    plain = requests.answers(None) if settings.served else []
    costs = f.relative_costs(drafts, plain)
    selections = f.make_selections(drafts, grid, loss, settings.levels, costs)
    certified = f.loosest_certified(selections[found.selection])
    thresholds = {*settings.thresholds, *([certified.threshold] if certified else [])}
    figures = f.Calibration(
        errors_allowed=errors_allowed(len(drafts), *settings.levels),
        wrong_drafts=Proportion.of(sum(draft.is_wrong(loss) for draft in drafts), len(drafts)),
        selections=selections,
        served=tuple(
            f.compare_served(threshold, requests.answers(threshold), plain, settings.delta)
            for threshold in sorted(thresholds if plain else ())
        ),
        bins=f.reliability(drafts),
    )
    certificate = Certificate(
        threshold=certified.threshold if certified else None,
        alpha=settings.alpha,
        delta=settings.delta,
        loss=loss,
        requests=len(drafts),
        errors=certified.error_rate.count if certified else None,
        data_set=_data_set(collector.task, settings.total),
        sampling="greedy",
        fingerprint=found,
        first_verdicts=spread_out([min(draft.verdicts) for draft in drafts if draft.verdicts]),
    )
    return figures, certificate


def _data_set(task: Assignment, count: int) -> str:
    """Names a task's first problems, with a digest of their texts."""
    texts = "\n".join(item.text for item in task.items[:count])
    return f"{task.title} ({count} problems, {hashlib.sha256(texts.encode()).hexdigest()[:16]})"


def _decoder(settings: CalibrateSettings) -> Callable[[Sequence[int]], str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer)

    def decode(ids: Sequence[int]) -> str:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(tokenizer.decode(list(ids), **options))

    return decode
