"""A calibration: pilot, calibration set, then the check by whole answers on other problems."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import Progress

from sglang_parse.calibrate.certify import errors_allowed, fewest_requests, make_grid
from sglang_parse.calibrate.drafts import JUDGE_ALL, collect, look_at
from sglang_parse.calibrate.figures import (
    Calibration,
    RuleFigures,
    Served,
    Share,
    costs_of,
    make_rules,
    reliability,
    whole_wrong_answers,
)
from sglang_parse.calibrate.losses import ANSWER, TOKEN, FirstDraft, Loss
from sglang_parse.calibrate.page import render
from sglang_parse.calibrate.report import certificate_of, conditions, content, data_set_of
from sglang_parse.calibrate.served import Mark, answer_all, compared, plain_ms, way_name
from sglang_parse.calibrate.settings import CalibrateSettings
from sglang_parse.calibrate.show import show_figures
from sglang_parse.calibrate.store import Store
from sglang_parse.client.ask import Asking
from sglang_parse.client.pool import Pool
from sglang_parse.client.program import Teller, write_json
from sglang_parse.client.records import PARSE, TITLES, Assignment, BenchError
from sglang_parse.client.servers import ENVIRONMENT, Endpoint
from sglang_parse.client.tables import add_bar, make_progress
from sglang_parse.client.targets import server_specs
from sglang_parse.core.certificate import Fingerprint
from sglang_parse.tasks import make_assignment

REQUEST_LIMIT_S = 1800.0


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Ask, test, write calibration.json and report.html, print a table.

    Raises:
        BenchError: a server or a request failed.
        TaskError: the task's file or its grader is not there.
    """
    settings, say = CalibrateSettings.read(arguments), Teller(console)
    loss, task = with_loss(_task(settings), settings.loss)
    _say_what_can_be(settings, say)
    specs = [] if settings.remote else server_specs(settings.models, (PARSE,))
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


def with_loss(task: Assignment, wanted: Loss | None) -> tuple[Loss, Assignment]:
    """Which error counts, and the task without what is not needed for it: a grader that need not
    say where a text goes wrong is not asked.

    Raises:
        BenchError: it would have to, and cannot.
    """
    loss: Loss = wanted or (TOKEN if task.locate else ANSWER)
    if loss == ANSWER:
        return loss, replace(task, locate=None)
    if task.locate is None:
        raise BenchError(f"--loss is {loss!r}, but {task.title} cannot say where a text goes wrong")
    return loss, task


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
        settings, loss = self.settings, self.loss
        levels = settings.alpha, settings.delta
        found = look_at(self.endpoint, self.task, self._asking(self.task.max_tokens, JUDGE_ALL))
        drafts = self._drafts(found)
        pilot, drafts = drafts[: settings.pilot], drafts[settings.pilot :]
        grid = make_grid((v for draft in pilot for v in draft.verdicts), settings.grid)
        plain = self._answers(found, None)
        rules = make_rules(drafts, grid, loss, *levels, costs_of(drafts, plain_ms(plain)))
        own = next(figures for figures in rules if figures.rule == found.selection)
        answers = None
        if own.certified is not None and loss == TOKEN:
            answers = whole_wrong_answers(drafts, own.rule, own.certified)
        figures = Calibration(
            rule=own.rule,
            loss=loss,
            alpha=settings.alpha,
            delta=settings.delta,
            requests=settings.requests,
            errors_allowed=errors_allowed(settings.requests, *levels),
            wrong=Share.of(sum(draft.is_wrong(loss) for draft in drafts), len(drafts)),
            rules=rules,
            answers=answers,
            served=self._check(found, own, plain),
            bins=reliability(drafts),
        )
        return figures, found, drafts

    def _drafts(self, found: Fingerprint) -> list[FirstDraft]:
        """Of the pilot and the calibration set."""
        # A first draft ends at its budget; behind it nothing is of interest.
        limit = min(self.task.max_tokens, found.draft_tokens + 2)
        count = self.settings.pilot + self.settings.requests
        with self._bar("first drafts", count) as advance:
            return collect(
                *(self.endpoint, self.task, range(count)),
                *(self._asking(limit, JUDGE_ALL), self._store("drafts", found), self._decoder()),
                concurrency=self.settings.concurrency,
                on_draft=advance,
            )

    def _check(
        self, found: Fingerprint, own: RuleFigures, plain: Sequence[Mark]
    ) -> tuple[Served, ...]:
        """Answers at the certified threshold and at those that were asked for."""
        if not plain:
            return ()
        certified = () if own.certified is None else (own.certified,)
        return tuple(
            compared(own.rule, t, self._answers(found, t), plain, self.settings.delta)
            for t in sorted({*certified, *self.settings.thresholds})
        )

    def _answers(self, found: Fingerprint, threshold: float | None) -> list[Mark]:
        """To the check's problems; None: the plain target's."""
        if not self.settings.served:
            return []
        way = found.selection, threshold
        indices = range(self.settings.total - self.settings.served, self.settings.total)
        with self._bar(f"answers: {way_name(*way)}", len(indices)) as advance:
            return answer_all(
                *(self.endpoint, self.task, indices),
                *(self._asking(self.task.max_tokens, {}), way, self._store("answers", found)),
                concurrency=self.settings.concurrency,
                on_answer=advance,
            )

    def _store(self, name: str, found: Fingerprint) -> Store:
        """First drafts and the plain target's answers are the same under every rule."""
        path = self.settings.output / f"{name}.jsonl"
        return Store(path, self._conditions(found) | {"selection": "any"})

    def _conditions(self, found: Fingerprint) -> dict[str, Any]:
        task = {"task": self.task.title, "max_tokens": self.task.max_tokens}
        file = str(self.settings.task_file or "")
        located = self.task.locate is not None
        return found.model_dump() | task | {"task_file": file, "located": located}

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
