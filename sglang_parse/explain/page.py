"""explain.html: one self-contained file with a movable threshold.

Accepted lengths at other thresholds come from the server's selection rule
(``client.traced.ExplainedRound``); the page's script looks them up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sglang_parse.client import page
from sglang_parse.client.records import STAGES
from sglang_parse.client.traced import (
    ACCEPTED,
    DROPPED,
    REJECTED,
    UNVERIFIED,
    ExplainedAnswer,
    Run,
    Segment,
)

MARKS = {ACCEPTED: "✓", REJECTED: "✗", DROPPED: "–", UNVERIFIED: "…"}
"""Shown beside the colour, which not everybody can see."""
MAX_LOGIT = 9.2
"""Logit at the ends of a verdict's scale: 0.0001 and 0.9999."""
TICKS = (0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999)
LEVELS = ((0.1, "lowest"), (0.5, "low"), (0.9, "middle"), (0.99, "high"), (math.inf, "highest"))
"""(upper bound of the verdict, class of the segment's colour)."""


def render(answers: Sequence[ExplainedAnswer], facts: dict[str, Any]) -> str:
    """Renders the page; ``facts``: ``date`` and ``source``, for its head."""
    thresholds = {
        one.record["threshold"] for answer in answers for one in answer.rounds if one.accepted_at
    }
    return page.render(
        "sglang_parse.explain",
        "explain.html.j2",
        position=position,
        level=level,
        visible=visible,
        visible_runs=visible_runs,
        stages=stages,
        max_logit=MAX_LOGIT,
        marks=MARKS,
        answers=answers,
        facts=facts,
        ticks=TICKS,
        levels=LEVELS,
        threshold=min(thresholds, default=None),  # the slider's first position
    )


def position(verdict: float) -> float:
    """Where a verdict or threshold is on its scale, in percent of the width. The scale is linear in
    the logit, as most verdicts are close to 0 or 1."""
    if not 0 < verdict < 1:
        return 0.0 if verdict <= 0 else 100.0
    logit = math.log(verdict / (1 - verdict))
    return 50 * (1 + max(-MAX_LOGIT, min(MAX_LOGIT, logit)) / MAX_LOGIT)


def level(verdict: float | None) -> str:
    if verdict is None:
        return "unasked"
    return next(name for below, name in LEVELS if verdict < below)


def visible(text: str) -> str:
    """A segment without line ends, or with arrows for them if there is nothing else."""
    stripped = text.rstrip("\n")
    return stripped if stripped.strip() else stripped + "↵" * (len(text) - len(stripped))


def visible_runs(segment: Segment) -> list[Run]:
    """A segment's runs, with line ends as in ``visible``."""
    left, runs = len(visible(segment.text)), []
    if not segment.text.strip():
        return [Run(visible(segment.text))]
    for run in segment.runs:
        if text := run.text[:left]:
            runs.append(Run(text, run.target))
        left -= len(text)
    return runs


def stages(answer: ExplainedAnswer) -> list[tuple[str, float, float]]:
    """(Stage, ms, percentage of all); empty for an answer without stage times."""
    times = {stage: float(answer.parse.get(f"{stage}_ms", 0.0)) for stage in STAGES}
    total = sum(times.values())
    return [(stage, ms, 100 * ms / total) for stage, ms in times.items()] if total else []
