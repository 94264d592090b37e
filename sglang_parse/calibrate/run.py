"""A calibration: pilot, calibration set, then a check by whole answers to other problems."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from sglang_parse.calibrate import figures as f
from sglang_parse.calibrate.report import content, sections
from sglang_parse.calibrate.settings import CalibrateSettings
from sglang_parse.client.program import ProgressLog
from sglang_parse.client.records import Assignment, BenchError
from sglang_parse.client.tables import publish
from sglang_parse.core.certificate import ANSWER, TOKEN, Certificate, Loss, spread_out
from sglang_parse.tasks.assignment import data_set, make_assignment
from sglang_parse.tasks.collect import Collector, GradedDraft, open_collector

NO_SEPARATION = 3
"""Exit code where right and wrong drafts get the same verdicts: nothing to serve with."""


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Calibrates; writes calibration.json and report.html, prints tables."""
    settings, log = CalibrateSettings.read(arguments), ProgressLog(console)
    loss, task = with_loss(_load_task(settings), settings.loss)
    log(_requirement(settings))
    with open_collector(settings, task, console, log) as collector:
        figures, certificate = calibrate(settings, loss, collector)
    facts = settings.conditions("scipy", log.seconds, ("pilot", "served", "concurrency"))
    facts["max_tokens"] = task.max_tokens
    file = settings.output / "calibration.json"
    written, shown = (make(figures, certificate, facts) for make in (content, sections))
    publish(console, file, written, "Calibration", shown)
    is_useless = figures.separation.is_at_chance
    if certificate.threshold is not None and not is_useless:
        console.print(f"serve with it: --parse-threshold {file}", highlight=False)
    return NO_SEPARATION if is_useless else 0


def _load_task(settings: CalibrateSettings) -> Assignment:
    """Loads as many different problems as the three sets need."""
    total = settings.total
    task = make_assignment(settings.task_file, settings.grader, total, settings.max_tokens)
    if len(task.items) < total:
        raise BenchError(
            f"{task.title} has {len(task.items)} problems; --pilot {settings.pilot}, --requests "
            f"{settings.requests} and --served {settings.served} need {total} different ones"
        )
    return task


def with_loss(task: Assignment, wanted: Loss | None) -> tuple[Loss, Assignment]:
    """Chooses the loss; the task is returned without a locator where the loss needs none."""
    loss: Loss = wanted or (TOKEN if task.locate else ANSWER)
    if loss == TOKEN and task.locate is None:
        raise BenchError(f"--loss is {loss!r}, but {task.title} cannot say where a text goes wrong")
    return loss, task if loss == TOKEN else replace(task, locate=None)


def _requirement(settings: CalibrateSettings) -> str:
    alpha, delta = settings.levels
    allowed = f.errors_allowed(settings.requests, alpha, delta)
    if allowed >= 0:
        return f"a threshold passes with at most {allowed} errors in {settings.requests} requests"
    return (
        f"{settings.requests} requests certify nothing at alpha {alpha:g} and delta {delta:g}, "
        f"even without an error: {f.fewest_requests(alpha, delta)} or more can"
    )


def calibrate(
    settings: CalibrateSettings, loss: Loss, collector: Collector
) -> tuple[f.Calibration, Certificate]:
    """Requests the first drafts and the whole answers, and returns their figures."""
    server, served_threshold = collector.served
    pilot, total = settings.pilot, settings.total
    drafts = collector.first_drafts(range(pilot + settings.requests))
    verdicts = (verdict for draft in drafts[:pilot] for verdict in draft.verdicts)
    drafts = drafts[pilot:]
    thresholds = {served_threshold, *settings.thresholds}
    grid = f.make_grid(verdicts, settings.grid, thresholds)
    tested = f.make_thresholds(drafts, server.selection, grid, loss, settings.levels)
    certified = f.loosest_certified(tested)
    thresholds |= {certified.threshold} if certified else set()
    last = range(total - settings.served, total)

    def scores(name: str, parse: dict[str, float] | None) -> list[int]:
        """Grades whole answers to the last set's problems."""
        read = lambda answer: collector.grade(answer.problem, answer.text)  # noqa: E731
        return collector.collect(name, last, parse, read) if last else []

    plain = scores("plain answers", None)
    found = {t: scores(f"answers {server.selection} {t}", {"threshold": t}) for t in thresholds}
    figures = f.Calibration(
        served_threshold=served_threshold,
        errors_allowed=f.errors_allowed(len(drafts), *settings.levels),
        separation=f.separation(drafts, loss),
        thresholds=tested,
        served=tuple(
            f.compare_served(threshold, found[threshold], plain, settings.delta)
            for threshold in sorted(thresholds if last else ())
        ),
    )
    return figures, _certificate(settings, loss, collector, drafts, certified)


def _certificate(
    settings: CalibrateSettings,
    loss: Loss,
    collector: Collector,
    drafts: Sequence[GradedDraft],
    certified: f.AtThreshold | None,
) -> Certificate:
    server, _ = collector.served
    return Certificate(
        threshold=certified.threshold if certified else None,
        alpha=settings.alpha,
        delta=settings.delta,
        loss=loss,
        requests=len(drafts),
        errors=certified.error_rate.count if certified else None,
        data_set=data_set(collector.task, settings.total),
        sampling="greedy",
        fingerprint=server,
        first_verdicts=spread_out([min(draft.verdicts) for draft in drafts if draft.verdicts]),
    )
