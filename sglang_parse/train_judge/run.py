"""A training: labeled drafts with hidden states, then the head.

First drafts train a head. A server with that head answers the same problems, and what it drafts
behind the first drafts trains the head again, together with them: a judge decides what later drafts
follow, so nobody else's answers have them (DAgger, arXiv 1011.0686).
"""

from __future__ import annotations

import argparse
import hashlib
import os
from dataclasses import replace
from typing import Any

from rich.console import Console
from transformers import AutoTokenizer

from sglang_parse.client.program import ProgressLog, write_json
from sglang_parse.client.records import Assignment, BenchError
from sglang_parse.client.servers import ENVIRONMENT
from sglang_parse.client.tables import add_bar, make_progress, publish
from sglang_parse.client.targets import parse_settings
from sglang_parse.core.certificate import Fingerprint
from sglang_parse.core.config import MAX_DRAFT
from sglang_parse.core.judge import FILE
from sglang_parse.tasks.assignment import data_set, make_assignment
from sglang_parse.tasks.collect import open_collector
from sglang_parse.train_judge.data import data_assignment
from sglang_parse.train_judge.drafts import NothingToLearnError, TrainingSet
from sglang_parse.train_judge.gather import Given, HiddenStates, gather, gather_later
from sglang_parse.train_judge.report import sections
from sglang_parse.train_judge.result import JudgeReport, content, write_weights
from sglang_parse.train_judge.settings import TrainJudgeSettings
from sglang_parse.train_judge.training import num_steps, train

SHOWN = "labels", "drafts", "max_rows", "concurrency"
"""Settings that the conditions repeat."""


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Trains; writes judge.json, judge.safetensors and report.html, prints the figures."""
    settings, log = TrainJudgeSettings.read(arguments), ProgressLog(console)
    task, given = load_task(settings), None
    if settings.data:
        settings, given = with_given_drafts(settings, task)
    try:
        report, fingerprint = learn(settings, task, given, console, log)
    except NothingToLearnError as error:
        console.print(f"There is no head: {error}.", highlight=False)
        return 0
    facts = settings.conditions("scikit-learn", log.seconds, SHOWN)
    facts["data_set"] = data_set(task)
    written, shown = (make(report, fingerprint, facts) for make in (content, sections))
    write_weights(settings.output, report)
    publish(console, settings.output / FILE, written, "Verdict head", shown)
    if not report.is_useless:
        console.print(f"serve with it: --parse-judge {settings.output}", highlight=False)
    return 0


def learn(
    settings: TrainJudgeSettings,
    task: Assignment,
    given: Given | None,
    console: Console,
    log: ProgressLog,
) -> tuple[JudgeReport, Fingerprint]:
    """Trains on first drafts; serves that head, and trains on later drafts, too.

    Raises:
        NothingToLearnError: right and wrong drafts get the same scores, or one kind is missing.
    """
    with open_collector(settings, task, console, log) as collector:
        states, fingerprint = HiddenStates.of(collector, given), collector.served[0]
        count = len(task.items) if settings.data else min(settings.requests, len(task.items))
        drafts = gather(collector, range(count), states, given)
        log(f"{len(drafts)} of {count} drafts have a label")

    def trained() -> JudgeReport:
        data = TrainingSet(drafts, states.layers, states.hidden_size, task.locate is not None)
        with make_progress(console) as progress:
            bar = add_bar(progress, "train", num_steps(data))
            found = train(data, settings.max_rows, lambda: progress.advance(bar))
        return JudgeReport.of(data, found)

    report = trained()
    reason = settings.why_first_drafts_alone(task)
    if report.is_useless:
        reason = "this head is no judge"
    if reason:
        log(f"first drafts alone: {reason}")
        return report, fingerprint
    write_weights(settings.output, report)
    write_json(settings.output / FILE, content(report, fingerprint, {}))
    with open_collector(settings.with_judge(report.segment), task, console, log) as collector:
        later = gather_later(collector, range(count), states, fingerprint.segment)
        log(f"{len(later)} drafts follow a first one")
        drafts += later
    return trained(), fingerprint


def load_task(settings: TrainJudgeSettings) -> Assignment:
    if settings.data:
        digest = hashlib.sha256(settings.data.read_bytes()).hexdigest()[:16]
        task = data_assignment(settings.data, f"{settings.data.name} ({digest})")
    else:
        make = settings.task_file, settings.grader, settings.requests, settings.max_tokens
        task = make_assignment(*make, is_training=True)
    return replace(task, locate=None) if settings.labels == "answers" else task


def with_given_drafts(
    settings: TrainJudgeSettings, task: Assignment
) -> tuple[TrainJudgeSettings, Given]:
    """Tokenizes the drafts of ``--data``; the server that is started takes the longest one."""
    os.environ.update({} if settings.remote else ENVIRONMENT)
    tokenizer: Any = AutoTokenizer.from_pretrained(settings.tokenizer)
    given = []
    for item in task.items:
        text = item.reference.draft
        ids = tokenizer.encode(text, add_special_tokens=False)
        back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if item.reference.right_chars is not None and back != text:
            raise BenchError(
                f"{settings.data}: {item.key}: tokens of the draft decode to {back[:80]!r}..., so "
                "right_chars has no place in them; fix: null, or that text"
            )
        given.append([*ids, tokenizer.eos_token_id])
    longest = max(range(len(given)), key=lambda place: len(given[place]))
    num_tokens = len(given[longest]) - 1  # the first one is no draft token
    if num_tokens > MAX_DRAFT:
        raise BenchError(
            f"{settings.data}: {task.items[longest].key}: the draft has {num_tokens} tokens; "
            f"use at most {MAX_DRAFT}"
        )
    flags = (*parse_settings(draft_tokens=num_tokens), *settings.parse_flags)
    options = [{"draft_token_ids": ids} for ids in given]
    return replace(settings, parse_flags=flags), options.__getitem__
