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
    makers = (_block_goals, _stock_goals, _plain_goals, _composition_goals)
    return (*(goal for make in makers for goal in make(figures, measured)), *_accuracy(figures))


def _ratios(measured: Measured, concurrency: int, over: Variant, under: Variant) -> list[float]:
    return speedups(measured.at(concurrency), over, under)


def _block_goals(figures: Comparison, measured: Measured) -> Iterator[Goal]:
    """A draft that writes several tokens a forward against the same one, token by token."""
    for concurrency in figures.concurrencies:
        ratios = _ratios(measured, concurrency, Variant(PARSE), Variant(PARSE_ONE))
        if concurrency > 1 and ratios:
            name = f"PARSE over the same, draft token by token, at {concurrency} requests"
            yield Goal(name, median(ratios), "at least", MIN_OVER_ONE)


def _stock_goals(_: Comparison, measured: Measured) -> Iterator[Goal]:
    for name in (STANDALONE, EAGLE3):
        if ratios := _ratios(measured, 1, Variant(PARSE), Variant(name)):
            yield Goal(f"PARSE over {TITLES[name]}", median(ratios), "at least", MIN_OVER_STOCK)


def _plain_goals(figures: Comparison, measured: Measured) -> Iterator[Goal]:
    parse = figures.find(Variant(PARSE))
    for concurrency in figures.concurrencies:
        if ratios := _ratios(measured, concurrency, Variant(PARSE), Variant(PLAIN)):
            least = MIN_OVER_PLAIN if concurrency == 1 else MIN_OVER_PLAIN_CONCURRENT
            name = f"PARSE over the plain target at {concurrency}"
            yield Goal(name, median(ratios), "at least", least)
            if concurrency == 1 and parse and parse.time and parse.time.limit:
                reached = median(ratios) / parse.time.limit
                yield Goal("fraction of the limit", reached, "at least", MIN_LIMIT_FRACTION)


def _composition_goals(figures: Comparison, measured: Measured) -> Iterator[Goal]:
    """PARSE+EAGLE3 against the better of its two parts in the same run, at every threshold."""
    levels: list[tuple[float, float]] = []
    for one in figures.variants:
        if one.server != PARSE_EAGLE3 or one.time is None:
            continue
        parts = (Variant(PARSE, one.threshold), Variant(EAGLE3))
        ratios = [_ratios(measured, 1, one.variant, part) for part in parts]
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


def _accuracy(figures: Comparison) -> Iterator[Goal]:
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
