"""Timed loads and graded answers to figures. Statistics only.

A speedup is the quotient of two ways' output tokens per second in the same run: same problems,
minutes apart. Medians are over the runs, and ranges are from the smallest run to the largest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from sglang_parse.bench.compare.lineup import (
    EAGLE3,
    PARSE,
    PARSE_EAGLE3,
    PLAIN,
    STANDALONE,
    TITLES,
)
from sglang_parse.bench.compare.quality import PairedTest, Quality, paired_test, quality_of
from sglang_parse.bench.compare.records import (
    LATENCIES,
    PERCENTILES,
    Look,
    Marks,
    Timed,
    Way,
    share_accepted,
)
from sglang_parse.bench.demo.figures import STAGES, rounded
from sglang_parse.bench.demo.load import Reply

MIN_OVER_STOCK = 1.3
MIDDLE = 0.5


@dataclass(frozen=True, slots=True)
class Spread:
    """Over the runs."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        values = list(values)
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class SpeedAt:
    """One way at one concurrency.

    Attributes:
        over: other server -> speedup over it, for those measured at this concurrency.
        latency_ms: kind -> percentile -> median over the runs.
    """

    concurrency: int
    tokens_per_s: Spread
    over: dict[str, Spread]
    latency_ms: dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class WhereTimeGoes:
    """PARSE's time per request, one at a time.

    Attributes:
        ms_per_request: stage -> ms, medians over the runs.
        draft_share: output tokens that are accepted draft tokens, 0 to 1.
        rounds_per_request: verification passes.
    """

    ms_per_request: dict[str, float]
    draft_share: float
    rounds_per_request: float


@dataclass(frozen=True, slots=True)
class WayFigures:
    """All of one way; ``time`` is None without PARSE.

    ``accept_length``: tokens per verification pass, from the graded answers; None without
    speculation.
    """

    server: str
    threshold: float | None
    speeds: tuple[SpeedAt, ...]
    quality: Quality | None
    accept_length: float | None
    time: WhereTimeGoes | None

    @property
    def way(self) -> Way:
        return Way(self.server, self.threshold)

    def speed_at(self, concurrency: int) -> SpeedAt | None:
        return next((speed for speed in self.speeds if speed.concurrency == concurrency), None)


@dataclass(frozen=True, slots=True)
class Goal:
    """One figure to reach.

    ``missed_by``: the share of the mark that is lacking; 0 when reached.
    """

    name: str
    value: float
    wanted: str
    reached: bool
    missed_by: float

    @classmethod
    def at_least(cls, name: str, value: float, least: float) -> Goal:
        reached = value >= least - 1e-9
        lacking = 0.0 if reached else (least - value) / least
        return cls(name, value, f"at least {least}", reached, lacking)


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything the page shows.

    ``noise``: the baseline against itself, answered twice.
    """

    ways: tuple[WayFigures, ...]
    noise: PairedTest | None
    checks: tuple[Goal, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data, floats rounded to 4 places."""
        return rounded(asdict(self))

    def find(self, way: Way) -> WayFigures | None:
        return next((figures for figures in self.ways if figures.way == way), None)


def make_figures(
    ways: Sequence[Way],
    timed: Sequence[Timed],
    looks: Sequence[Look],
    marks: Sequence[Marks],
    own_threshold: float,
) -> Figures:
    """All figures of a comparison.

    Args:
        ways: in the order of the page; the plain target, if among them, is the baseline.
        own_threshold: at which PARSE is measured like the others, at every concurrency.
    """
    baseline = _marks_of(marks, Way(PLAIN), 0)
    again = _marks_of(marks, Way(PLAIN), 1)
    figures = tuple(_way_figures(way, timed, looks, marks, baseline) for way in ways)
    noise = None
    if baseline is not None and again is not None:
        noise = paired_test(again.scores, baseline.scores)
    return Figures(figures, noise, make_checks(figures, timed, own_threshold))


def _way_figures(
    way: Way,
    timed: Sequence[Timed],
    looks: Sequence[Look],
    marks: Sequence[Marks],
    baseline: Marks | None,
) -> WayFigures:
    mine = [item for item in timed if item.way == way]
    concurrencies = sorted({item.concurrency for item in mine})
    graded = _marks_of(marks, way, 0)
    looked = [look for look in looks if look.way == way]
    return WayFigures(
        server=way.server,
        threshold=way.threshold,
        speeds=tuple(_speed_at(way, timed, concurrency) for concurrency in concurrencies),
        quality=None if graded is None else quality_of(graded, baseline),
        accept_length=None if graded is None else accept_length(graded.replies),
        time=_where_time_goes(looked) if looked else None,
    )


def _marks_of(marks: Sequence[Marks], way: Way, repeat: int) -> Marks | None:
    return next((m for m in marks if (m.way, m.repeat) == (way, repeat)), None)


def _speed_at(way: Way, timed: Sequence[Timed], concurrency: int) -> SpeedAt:
    here = [item for item in timed if item.concurrency == concurrency]
    mine = [item for item in here if item.way == way]
    others = {name: speedups(here, way, Way(name)) for name in (PLAIN, STANDALONE, EAGLE3)}
    return SpeedAt(
        concurrency=concurrency,
        tokens_per_s=Spread.of(item.tokens_per_s for item in mine),
        over={name: Spread.of(ratios) for name, ratios in others.items() if ratios},
        latency_ms={
            kind: {p: median(item.latency_ms[kind][p] for item in mine) for p in PERCENTILES}
            for kind in LATENCIES
        },
    )


def speedups(timed: Iterable[Timed], way: Way, other: Way) -> list[float]:
    """Quotients of tokens per second at one concurrency, one per run that has both."""
    rates = {(item.way, item.run): item.tokens_per_s for item in timed}
    runs = sorted({run for _, run in rates})
    return [
        rates[way, run] / rates[other, run]
        for run in runs
        if (way, run) in rates and (other, run) in rates
    ]


def accept_length(replies: Sequence[Reply]) -> float | None:
    """Tokens per verification pass; None without passes.

    Stock speculation: output tokens, the prefill's apart, as SGLang counts its accept length.
    PARSE: draft tokens that were kept.
    """
    if all(reply.parse for reply in replies):
        kept = sum(reply.parse["accepted_tokens"] for reply in replies)
        passes = sum(reply.parse["rounds"] for reply in replies)
    else:
        kept = sum(reply.output_tokens - len(reply.texts) for reply in replies)
        passes = sum(reply.meta.get("spec_verify_ct") or 0 for reply in replies)
    return kept / passes if passes else None


def _where_time_goes(looks: Sequence[Look]) -> WhereTimeGoes:
    def per_request(key: str) -> float:
        return median(fmean(reply.parse[key] for reply in look.replies) for look in looks)

    return WhereTimeGoes(
        ms_per_request={stage: per_request(f"{stage}_ms") for stage in STAGES},
        draft_share=median(share_accepted(look.replies) for look in looks),
        rounds_per_request=per_request("rounds"),
    )


def make_checks(
    ways: Sequence[WayFigures], timed: Sequence[Timed], own_threshold: float
) -> tuple[Goal, ...]:
    """The figures to reach at one request at a time, for the servers that were measured."""
    timed = [item for item in timed if item.concurrency == 1]
    goals = []
    for name in (STANDALONE, EAGLE3):
        ratios = speedups(timed, Way(PARSE, own_threshold), Way(name))
        if ratios:
            goals.append(
                Goal.at_least(f"PARSE over {TITLES[name]}", median(ratios), MIN_OVER_STOCK)
            )
    return (*goals, *_composition_goals(ways, timed))


def _composition_goals(ways: Sequence[WayFigures], timed: Sequence[Timed]) -> Iterable[Goal]:
    """PARSE+EAGLE3 against the better of its two parts in the same run, at every threshold."""
    levels: list[tuple[float, float]] = []
    for figures in ways:
        if figures.server != PARSE_EAGLE3 or figures.time is None:
            continue
        parts = (Way(PARSE, figures.threshold), Way(EAGLE3))
        ratios = [speedups(timed, figures.way, part) for part in parts]
        if not all(ratios):
            continue
        ratio, share = median(map(min, *ratios)), figures.time.draft_share
        levels.append((share, ratio))
        name = f"{TITLES[PARSE_EAGLE3]} over its better part, {share:.0%} accepted"
        yield Goal.at_least(f"{name} (threshold {figures.threshold:g})", ratio, 1.0)
    if levels:
        share, ratio = min(levels, key=lambda level: abs(level[0] - MIDDLE))
        name = f"the same nearest the middle, {share:.0%} accepted: faster than both"
        yield Goal(name, ratio, "above 1.0", ratio > 1, max(0.0, 1 - ratio))
