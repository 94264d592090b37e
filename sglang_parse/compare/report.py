"""The comparison as results.json: figures, every run, every mark, the conditions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sglang_parse.client.conditions import date, machine, versions
from sglang_parse.client.figures import rounded
from sglang_parse.client.records import PARSE, STANDALONE, TITLES, BenchRun, ServingRun
from sglang_parse.client.servers import DEFAULTS, ENVIRONMENT, ServerSpec
from sglang_parse.client.targets import command_of
from sglang_parse.compare.figures import Comparison
from sglang_parse.compare.settings import OWN_THRESHOLD, CompareSettings

NOTES = {
    STANDALONE: "SGLang's STANDALONE shifts the prompt by one token, as EAGLE needs it: its draft "
    "model never sees the first token and accepts less than it could. PARSE's sees all of it.",
    PARSE: "On a CPU SGLang schedules the plain target and the draft alone with overlap, PARSE "
    "without, because a CPU that works through an iteration has nothing else to do.",
}
"""What a fair reader must know about a server that takes part."""


_ASKED = (
    *("task", "sampling", "runs", "concurrencies", "requests_per_run", "problems"),
    *("sweep_problems", "own_threshold", "thresholds", "seed"),
)
KEYS = {
    **dict.fromkeys(
        (f"conditions.{name}" for name in ("date", "minutes", "machine", "versions")),
        "when, where, with what",
    ),
    "conditions.servers": "every server's command line, or where it runs",
    "conditions.environment": "environment variables of the servers that were started",
    "conditions.bench_serving": "the command line of SGLang's benchmark",
    **dict.fromkeys((f"conditions.{name}" for name in _ASKED), "what was asked for"),
    "conditions.notes": "what a fair reader must know about a server",
    "conditions.order": "who played when",
    "marks.server": "whose answers",
    "marks.threshold": "what they asked for; null without PARSE",
    "marks.repeat": "0, or 1 for the baseline's second time",
    "marks.output_tokens": "of all answers",
    "marks.scores": "0 to 1 per problem; null each where the task could not be graded",
}
"""Keys of ``results`` that are no field of a record -> meaning."""


def results(
    figures: Comparison,
    timed: Sequence[ServingRun],
    marks: Sequence[BenchRun],
    facts: dict[str, Any],
) -> dict[str, Any]:
    """Plain data: what the page shows, and what it was computed from."""
    return {
        "conditions": facts,
        **figures.as_json(),
        "timed": [rounded(asdict(item)) for item in timed],
        "marks": [
            {
                **asdict(graded.variant),
                "repeat": graded.run,
                "output_tokens": graded.output_tokens,
                "scores": list(graded.scores),
            }
            for graded in marks
        ],
    }


def conditions(
    settings: CompareSettings,
    specs: Sequence[ServerSpec],
    task: str,
    bench_command: str,
    seconds: float,
) -> dict[str, Any]:
    """Machine, versions, commands, settings."""
    environment = {**DEFAULTS, **{key: os.environ[key] for key in DEFAULTS if key in os.environ}}
    return {
        "date": date(),
        "minutes": round(seconds / 60, 1),
        "machine": machine(),
        "versions": versions(),
        "servers": {TITLES[spec.name]: command_of(spec) for spec in specs}
        | {TITLES[name]: remote.url for name, remote in settings.remotes.items()},
        "environment": environment | ENVIRONMENT if specs else {},
        "bench_serving": bench_command,
        "task": task,
        "sampling": "greedy (temperature 0)",
        "runs": settings.runs,
        "concurrencies": list(settings.concurrencies),
        "requests_per_run": {str(c): settings.num_requests(c) for c in settings.concurrencies},
        "problems": settings.problems,
        "sweep_problems": settings.sweep_problems,
        "own_threshold": OWN_THRESHOLD,
        "thresholds": list(settings.thresholds),
        "seed": settings.seed,
        "notes": [NOTES[name] for name in settings.servers if name in NOTES],
        "order": "the servers take turns in every run, in reverse order in every second run; "
        "those not in use are suspended or ended",
    }
