"""The comparison as results.json, and the demo's result in sentences."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from sglang_parse.client.conditions import of_now
from sglang_parse.client.figures import rounded
from sglang_parse.client.records import (
    DRAFT,
    PARSE,
    PLAIN,
    STANDALONE,
    Variant,
    kind_of,
    title_of,
)
from sglang_parse.client.servers import DEFAULTS, ENVIRONMENT, ServerSpec
from sglang_parse.client.targets import command_of
from sglang_parse.compare.figures import Comparison, Measured, VariantFigures
from sglang_parse.compare.settings import CompareSettings

NOTES = {
    STANDALONE: "SGLang's STANDALONE shifts the prompt by one token, as EAGLE needs it: its draft "
    "model never sees the first token and accepts less than it could. PARSE's sees all of it.",
    PARSE: "On a CPU SGLang schedules the plain target and the draft alone with overlap, PARSE "
    "without, because a CPU that works through an iteration has nothing else to do.",
}
"""What a fair reader must know about a server that takes part."""

NEXT = """
Next, for your own models (sglang-parse is in .venv/bin):
  sglang-parse doctor SERVER_FLAGS      will the server work? Nothing is loaded
  sglang-parse doctor --url URL         does PARSE pay on a running server, and if not, why?
  sglang-parse explain --url URL        what is accepted and rejected, segment by segment
  sglang-parse calibrate --help         which threshold keeps the error rate you allow
"""


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


def demo_summary(figures: Comparison) -> Iterator[str]:
    """How much faster, how right, and what limits it, as far as it was measured."""
    parse = figures.find(Variant(PARSE))
    if parse is None:
        return
    over = [(s.concurrency, s.over[PLAIN].median) for s in parse.speeds if PLAIN in s.over]
    if over:
        speedups = ", ".join(f"{ratio:.1f}x at {concurrency}" for concurrency, ratio in over)
        yield f"PARSE's speed over the plain target: {speedups} requests at a time."
    found = (figures.find(Variant(name)) for name in (PARSE, PLAIN, DRAFT))
    yield f"Right answers: {', '.join(_graded(one) for one in found if one)}."
    time = parse.time
    if time is not None:
        limit = f" The upper bound of the speedup is {time.limit:.1f}x." if time.limit else ""
        yield (
            f"{time.draft_fraction + time.matched_fraction:.1%} of PARSE's output came from the "
            f"draft model: {time.draft_fraction:.1%} accepted by a verdict, "
            f"{time.matched_fraction:.1%} matched by the target's own choice.{limit}"
        )
    faster = [s.concurrency for s in parse.speeds if DRAFT in s.over and s.over[DRAFT].median > 1]
    if faster:
        yield (
            f"It was faster than the draft alone at {' and '.join(map(str, faster))}: in PARSE a "
            "parallel draft model writes several tokens per forward, in stock SGLang one."
        )


def _graded(one: VariantFigures) -> str:
    quality = one.quality
    if quality is None or quality.score is None:
        return f"{one.variant.label} not graded"
    return f"{one.variant.label} {quality.score:.1%} of {quality.problems}"
