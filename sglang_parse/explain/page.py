"""explain.html: one file that needs nothing else, with a threshold that can be moved.

What a threshold would keep is worked out here, by the server's own rule
(``client.traced.Keeps``); the page only looks it up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from sglang_parse.client.records import STAGES
from sglang_parse.client.traced import DROPPED, KEPT, REJECTED, UNJUDGED, Made, Round

_TEMPLATES = ("sglang_parse.explain", "sglang_parse.client")
"""Packages with the page, and with what pages share."""
MARKS = {KEPT: "✓", REJECTED: "✗", DROPPED: "–", UNJUDGED: "…"}
"""So that nothing is told by colour alone."""
WIDEST = 9.2
"""Logit at the ends of a verdict's bar: 0.0001 and 0.9999."""
TICKS = (0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999)
LEVELS = ((0.1, "lowest"), (0.5, "low"), (0.9, "middle"), (0.99, "high"), (math.inf, "highest"))
"""Verdicts below -> class of the segment's colour."""


def render(answers: Sequence[Made], facts: dict[str, Any]) -> str:
    """The page's text.

    Args:
        facts: ``date`` and ``source``, for its head.
    """
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name, "templates") for name in _TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "place": place,
        "level": level,
        "shown": shown,
        "keeps": keeps,
        "stages": stages,
        "widest": WIDEST,
        "marks": MARKS,
    }
    thresholds = {one.record["threshold"] for made in answers for one in made.rounds if one.keeps}
    return environment.get_template("explain.html.j2").render(
        answers=answers,
        facts=facts,
        ticks=TICKS,
        levels=LEVELS,
        # The line starts where most of the page was made.
        threshold=min(thresholds, default=None),
    )


def place(verdict: float) -> float:
    """Where a verdict or a threshold is on its bar, in percent of its width: linear in its logit,
    because most verdicts are close to 0 or to 1."""
    if not 0 < verdict < 1:
        return 0.0 if verdict <= 0 else 100.0
    logit = math.log(verdict / (1 - verdict))
    return 50 * (1 + max(-WIDEST, min(WIDEST, logit)) / WIDEST)


def level(verdict: float | None) -> str:
    """Class of the colour."""
    if verdict is None:
        return "unasked"
    return next(name for below, name in LEVELS if verdict < below)


def shown(text: str) -> str:
    """A segment's text for the page: an end of line shows where nothing else does."""
    stripped = text.rstrip("\n")
    return stripped if stripped.strip() else stripped + "↵" * (len(text) - len(stripped))


def keeps(one: Round) -> list[list[float | None]]:
    """[[largest threshold, draft tokens kept], ...] as the page's script looks it up."""
    return [[entry.up_to, entry.accepted_len] for entry in one.keeps]


def stages(made: Made) -> list[tuple[str, float, float]]:
    """Stage, ms, percent of all; none where the answer has no times."""
    times = {stage: float(made.parse.get(f"{stage}_ms", 0.0)) for stage in STAGES}
    total = sum(times.values())
    return [(stage, ms, 100 * ms / total) for stage, ms in times.items()] if total else []
