"""A calibration: pilot, calibration set, then the check by whole answers on other problems."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import Progress

from sglang_parse.bench.calibrate.certify import errors_allowed, fewest_requests, make_grid
from sglang_parse.bench.calibrate.drafts import JUDGE_ALL, collect, look_at
from sglang_parse.bench.calibrate.figures import (
    Calibration,
    RuleFigures,
    Served,
    Share,
    costs_of,
    make_rules,
    reliability,
    whole_wrong_answers,
)
from sglang_parse.bench.calibrate.losses import ANSWER, TOKEN, FirstDraft, Loss
from sglang_parse.bench.calibrate.page import render
from sglang_parse.bench.calibrate.report import certificate_of, conditions, content, data_set_of
from sglang_parse.bench.calibrate.served import Mark, answer_all, compared, plain_ms, way_name
from sglang_parse.bench.calibrate.settings import CalibrateSettings
from sglang_parse.bench.calibrate.show import show_figures
from sglang_parse.bench.calibrate.store import Store
from sglang_parse.bench.harness.ask import Asking
from sglang_parse.bench.harness.lineup import lineup
from sglang_parse.bench.harness.match import Assignment
from sglang_parse.bench.harness.pool import Pool
from sglang_parse.bench.harness.program import Teller, write_json
from sglang_parse.bench.harness.records import PARSE, TITLES, BenchError
from sglang_parse.bench.harness.servers import ENVIRONMENT, Endpoint
from sglang_parse.bench.harness.tables import add_bar, make_progress
from sglang_parse.bench.tasks import make_assignment
from sglang_parse.core.certificate import Fingerprint

REQUEST_LIMIT_S = 1800.0


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Ask, test, write calibration.json and report.html, print a table.

    Raises:
        BenchError: a server or a request failed.
        TaskError: the task's file or its grader is not there.
    """
    settings, say = CalibrateSettings.read(arguments), Teller(console)
    task = _task(settings)
    loss = settings.loss or (TOKEN if task.locate else ANSWER)
    if loss == TOKEN and task.locate is None:
        raise BenchError(f"--loss is {loss!r}, but {task.title} cannot say where a text goes wrong")
    _say_what_can_be(settings, say)
    specs = [] if settings.remote else lineup(settings.models, (PARSE,))
    if specs:
        os.environ.update(ENVIRONMENT)
    remotes = {PARSE: settings.remote} if settings.remote else None
    with (
        Pool(
            *(specs, settings.output / "logs"),
            remotes=remotes,
            on_start=lambda name: say(f"start {TITLES[name]}"),
        ) as pool,
        pool.awake(PARSE) as (endpoint,),
        make_progress(console) as progress,
    ):
        calibrating = _Calibrating(settings, task, loss, endpoint, progress)
        figures, fingerprint, drafts = calibrating.play()
    data_set = data_set_of(task, settings.total)
    certificate = certificate_of(figures, drafts, fingerprint, data_set)
    facts = conditions(settings, specs, task, say.seconds)
    write_json(settings.output / "calibration.json", content(figures, certificate, facts))
    page = render(figures, certificate, facts)
    (settings.output / "report.html").write_text(page, encoding="utf-8")
    show_figures(console, figures, settings.output)
    return 0


def _task(settings: CalibrateSettings) -> Assignment:
    """As many different problems as the three sets need. Raises: BenchError, TaskError."""
    asked = (settings.task, settings.task_file, settings.total)
    task = make_assignment(*asked, settings.max_tokens, settings.options)
    if len(task.items) < settings.total:
        raise BenchError(
            f"{task.title} has {len(task.items)} problems; --pilot {settings.pilot}, --requests "
            f"{settings.requests} and --served {settings.served} need {settings.total} different "
            "ones"
        )
    if any(item.follow_ups for item in task.items[: settings.total]):
        raise BenchError(f"{task.title} has problems of several turns, which have no one grade")
    return task


def _say_what_can_be(settings: CalibrateSettings, say: Teller) -> None:
    fewest = fewest_requests(settings.alpha, settings.delta)
    allowed = errors_allowed(settings.requests, settings.alpha, settings.delta)
    if allowed < 0:
        say(
            f"{settings.requests} requests certify nothing at alpha {settings.alpha:g} and delta "
            f"{settings.delta:g}, even without an error: {fewest} or more can"
        )
    else:
        say(f"a threshold passes with {allowed} errors of {settings.requests} requests or fewer")


@dataclass(frozen=True, slots=True)
class _Calibrating:
    """One server, asked in order."""

    settings: CalibrateSettings
    task: Assignment
    loss: Loss
    endpoint: Endpoint
    progress: Progress

    def play(self) -> tuple[Calibration, Fingerprint, list[FirstDraft]]:
        settings = self.settings
        limit = self.task.max_tokens
        found = look_at(self.endpoint, self.task, self._asking(limit, JUDGE_ALL))
        # The first draft ends at its budget; behind it nothing is of interest.
        limit = min(limit, found.draft_tokens + 2)
        drafts = self._drafts(found, self._asking(limit, JUDGE_ALL))
        pilot, drafts = drafts[: settings.pilot], drafts[settings.pilot :]
        grid = make_grid((v for draft in pilot for v in draft.verdicts), settings.grid)
        rules = self._rules(drafts, grid, None)
        own = next(figures for figures in rules if figures.rule == found.selection)
        served, ms = self._check(found, own)
        rules = self._rules(drafts, grid, ms)
        answers = None
        if own.certified is not None and self.loss == TOKEN:
            answers = whole_wrong_answers(drafts, own.rule, own.certified)
        figures = Calibration(
            rule=own.rule,
            loss=self.loss,
            alpha=settings.alpha,
            delta=settings.delta,
            requests=settings.requests,
            errors_allowed=errors_allowed(settings.requests, settings.alpha, settings.delta),
            wrong=Share.of(sum(draft.is_wrong(self.loss) for draft in drafts), len(drafts)),
            rules=rules,
            answers=answers,
            served=tuple(served),
            bins=reliability(drafts),
        )
        return figures, found, drafts

    def _rules(
        self, drafts: Sequence[FirstDraft], grid: Sequence[float], ms: float | None
    ) -> tuple[RuleFigures, ...]:
        levels = self.settings.alpha, self.settings.delta
        return make_rules(drafts, grid, self.loss, *levels, costs_of(drafts, ms))

    def _drafts(self, found: Fingerprint, asking: Asking) -> list[FirstDraft]:
        # A first draft and its verdicts are the same under every rule.
        conditions = self._conditions(found) | {"selection": "any"}
        store = Store(self.settings.output / "drafts.jsonl", conditions)
        count = self.settings.pilot + self.settings.requests
        with self._bar("first drafts", count) as advance:
            return collect(
                *(self.endpoint, self.task, range(count), asking, store, self._decoder()),
                concurrency=self.settings.concurrency,
                on_draft=advance,
            )

    def _check(self, found: Fingerprint, own: RuleFigures) -> tuple[list[Served], float | None]:
        """Answers at the certified threshold and at those that were asked for."""
        if not self.settings.served:
            return [], None
        certified = () if own.certified is None else (own.certified,)
        thresholds = sorted({*certified, *self.settings.thresholds})
        rule, delta = own.rule, self.settings.delta
        plain = self._answers(found, (rule, None))
        served = [
            compared(rule, threshold, self._answers(found, (rule, threshold)), plain, delta)
            for threshold in thresholds
        ]
        return served, plain_ms(plain)

    def _answers(self, found: Fingerprint, way: tuple[str, float | None]) -> list[Mark]:
        conditions = self._conditions(found) | {"selection": "any"}
        store = Store(self.settings.output / "answers.jsonl", conditions)
        first, last = self.settings.total - self.settings.served, self.settings.total
        asking = self._asking(self.task.max_tokens, {})
        with self._bar(f"answers: {way_name(*way)}", last - first) as advance:
            return answer_all(
                *(self.endpoint, self.task, range(first, last), asking, way, store),
                concurrency=self.settings.concurrency,
                on_answer=advance,
            )

    def _conditions(self, found: Fingerprint) -> dict[str, Any]:
        task = {"task": self.task.title, "max_tokens": self.task.max_tokens}
        file = str(self.settings.task_file or "")
        return found.model_dump() | task | {"task_file": file}

    @contextmanager
    def _bar(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        bar = add_bar(self.progress, title, total)
        yield partial(self.progress.advance, bar)

    def _asking(self, max_tokens: int, custom_params: dict[str, Any]) -> Asking:
        return Asking(
            model=self.settings.model_name,
            max_tokens=max_tokens,
            custom_params=custom_params,
            limit_s=REQUEST_LIMIT_S,
        )

    def _decoder(self) -> Callable[[Sequence[int]], str]:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.settings.tokenizer)

        def decode(ids: Sequence[int]) -> str:
            return str(
                tokenizer.decode(
                    list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
                )
            )

        return decode
