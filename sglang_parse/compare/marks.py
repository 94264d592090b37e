"""The project's own marks for the demo pair: ``compare --marks``."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from sglang_parse.client.figures import Goal, speedups
from sglang_parse.client.records import (
    DRAFT,
    EAGLE3,
    PARSE,
    PARSE_EAGLE3,
    PARSE_ONE,
    PLAIN,
    STANDALONE,
    TITLES,
    Variant,
)
from sglang_parse.compare.figures import Comparison, Measured

MIN_OVER_STOCK = 1.3
MIN_OVER_ONE = 1.5
"""With blocks over without, where several requests run."""
MIN_OVER_PLAIN, MIN_OVER_PLAIN_CONCURRENT, MIN_LIMIT_FRACTION = 5.0, 1.0, 0.9
MAX_ACCURACY_LOSS, MIN_ACCURACY_GAIN = 0.01, 0.1
MIDDLE = 0.5


def make_goals(figures: Comparison, measured: Measured) -> tuple[Goal, ...]:
    """Marks for the servers that were measured."""
    makers = (_speed_goals, _composition_goals, _accuracy_goals)
    return tuple(goal for make in makers for goal in make(figures, measured))


def _speed_goals(figures: Comparison, _: Measured) -> Iterator[Goal]:
    parse = figures.find(Variant(PARSE))
    for speed in parse.speeds if parse else ():
        is_one = speed.concurrency == 1
        wanted = {PLAIN: MIN_OVER_PLAIN if is_one else MIN_OVER_PLAIN_CONCURRENT}
        wanted |= {STANDALONE: MIN_OVER_STOCK, EAGLE3: MIN_OVER_STOCK} if is_one else {}
        wanted |= {} if is_one else {PARSE_ONE: MIN_OVER_ONE}
        for name, least in wanted.items():
            if name in speed.over:
                title = f"PARSE over {TITLES[name]} at {speed.concurrency}"
                yield Goal(title, speed.over[name].median, "at least", least)
        if is_one and parse and parse.time and parse.time.limit:
            reached = speed.over[PLAIN].median / parse.time.limit
            yield Goal("fraction of the limit", reached, "at least", MIN_LIMIT_FRACTION)


def _composition_goals(figures: Comparison, measured: Measured) -> Iterator[Goal]:
    """PARSE+EAGLE3 against the better of its two parts in the same run, at every threshold."""
    levels: list[tuple[float, float]] = []
    for one in figures.variants:
        if one.server != PARSE_EAGLE3 or one.time is None:
            continue
        parts = (Variant(PARSE, one.threshold), Variant(EAGLE3))
        ratios = [speedups(measured.at(1), one.variant, part) for part in parts]
        if not all(ratios):
            continue
        ratio, fraction = median(map(min, *ratios)), one.time.draft_fraction
        levels.append((fraction, ratio))
        yield Goal(
            f"{one.variant.label} over its better part, {fraction:.0%} accepted",
            *(ratio, "at least", 1.0),
        )
    if levels:
        fraction, ratio = min(levels, key=lambda level: abs(level[0] - MIDDLE))
        name = f"the same nearest the middle, {fraction:.0%} accepted: faster than both"
        yield Goal(name, ratio, "above", 1.0)


def _accuracy_goals(figures: Comparison, _: Measured) -> Iterator[Goal]:
    scores = {}
    for name in (PLAIN, DRAFT, PARSE):
        found = figures.find(Variant(name))
        if found and found.quality and found.quality.score is not None:
            scores[name] = found.quality.score
    if {PLAIN, PARSE} <= set(scores):
        loss = scores[PLAIN] - scores[PARSE]
        yield Goal("accuracy lost against the target", loss, "at most", MAX_ACCURACY_LOSS)
    if {DRAFT, PARSE} <= set(scores):
        gain = scores[PARSE] - scores[DRAFT]
        yield Goal("accuracy gained over the draft", gain, "at least", MIN_ACCURACY_GAIN)
