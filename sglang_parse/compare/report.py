"""The comparison as results.json: figures, every run, every score, the conditions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sglang_parse.client.conditions import of_now
from sglang_parse.client.figures import rounded
from sglang_parse.client.records import PARSE, STANDALONE, kind_of, title_of
from sglang_parse.client.servers import DEFAULTS, ENVIRONMENT, ServerSpec
from sglang_parse.client.targets import command_of
from sglang_parse.compare.figures import Comparison, Measured
from sglang_parse.compare.settings import CompareSettings

NOTES = {
    STANDALONE: "SGLang's STANDALONE shifts the prompt by one token, as EAGLE needs it: its draft "
    "model never sees the first token and accepts less than it could. PARSE's sees all of it.",
    PARSE: "On a CPU SGLang schedules the plain target and the draft alone with overlap, PARSE "
    "without, because a CPU that works through an iteration has nothing else to do.",
}
"""What a fair reader must know about a server that takes part."""


def results(figures: Comparison, measured: Measured, facts: dict[str, Any]) -> dict[str, Any]:
    """Plain data: what the page shows, and what it was computed from."""
    return {
        "conditions": facts,
        **rounded(asdict(figures)),
        "serving_runs": [rounded(asdict(run)) for run in measured.serving],
        "graded_runs": [
            {
                "server": run.variant.server,
                "threshold": run.variant.threshold,
                "off_fraction": run.variant.off_fraction,
                "repeat": run.run,
                "output_tokens": run.output_tokens,
                "scores": list(run.scores),
            }
            for run in measured.graded
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
    kinds = dict.fromkeys(map(kind_of, settings.servers))
    return {
        **of_now(),
        "minutes": round(seconds / 60, 1),
        "servers": {title_of(spec.name): command_of(spec) for spec in specs}
        | {title_of(name): remote.url for name, remote in settings.remotes.items()},
        "environment": environment | ENVIRONMENT if specs else {},
        "bench_serving": bench_command,
        "task": task,
        "settings": asdict(settings),
        "requests_per_run": {str(c): settings.num_requests(c) for c in settings.concurrencies},
        "baseline": settings.baseline,
        "stock": list(settings.stock_servers),
        "notes": [NOTES[kind] for kind in kinds if kind in NOTES],
    }
