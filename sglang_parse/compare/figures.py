"""Runs of ``bench_serving`` and graded answers to figures. Statistics only.

A speedup is the quotient of two ways' output tokens per second in the same run: same problems,
minutes apart. Medians are over the runs, and ranges are from the smallest run to the largest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from sglang_parse.client.figures import (
    Goal,
    per_request,
    per_token,
    rounded,
    speedups,
    stage_ms,
)
from sglang_parse.client.records import (
    EAGLE3,
    LATENCIES,
    PARSE,
    PARSE_EAGLE3,
    PARSE_ONE,
    PERCENTILES,
    PLAIN,
    STANDALONE,
    TITLES,
    Answer,
    BenchRun,
    ServingRun,
    Variant,
)
from sglang_parse.compare.quality import PairedTest, Quality, paired_test, quality_of

MIN_OVER_STOCK = 1.3
MIN_OVER_ONE = 1.5
"""With blocks over without, where several requests run."""
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
        concurrency: requests at a time.
        tokens_per_s: output tokens per second: median, low and high of the runs.
        over: other server -> speedup over it, likewise, for those measured at this concurrency.
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
        ms_per_request: ms in each stage, medians over the runs.
        draft_share: output tokens that are accepted draft tokens, 0 to 1.
        rounds_per_request: verification passes.
    """

    ms_per_request: dict[str, float]
    draft_share: float
    rounds_per_request: float


@dataclass(frozen=True, slots=True)
class VariantFigures:
    """All of one way; ``time`` is None without PARSE.

    Attributes:
        server: one of ``TITLES``.
        threshold: what its requests ask for; None without PARSE.
        accept_length: tokens per verification pass, from the graded answers; None without
            speculation.
    """

    server: str
    threshold: float | None
    speeds: tuple[SpeedAt, ...]
    quality: Quality | None
    accept_length: float | None
    time: WhereTimeGoes | None

    @property
    def variant(self) -> Variant:
        return Variant(self.server, self.threshold)

    def speed_at(self, concurrency: int) -> SpeedAt | None:
        return next((speed for speed in self.speeds if speed.concurrency == concurrency), None)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything the page shows.

    Attributes:
        noise: the baseline against itself, answered twice.
        checks: the project's own figures to reach; none where other models are compared.
    """

    ways: tuple[VariantFigures, ...]
    noise: PairedTest | None
    checks: tuple[Goal, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data, floats rounded to 4 places."""
        checks = [goal.as_json() | {"missed_by": goal.missed_by} for goal in self.checks]
        return rounded(asdict(self) | {"checks": checks})

    def find(self, way: Variant) -> VariantFigures | None:
        return next((figures for figures in self.ways if figures.variant == way), None)


def make_comparison(
    ways: Sequence[Variant],
    timed: Sequence[ServingRun],
    looks: Sequence[BenchRun],
    marks: Sequence[BenchRun],
    own_threshold: float,
    *,
    has_goals: bool,
) -> Comparison:
    """All figures of a comparison.

    Args:
        ways: in the order of the page; the plain target, if among them, is the baseline.
        looks: answers one at a time, for PARSE's stage times.
        marks: graded answers; run 1 is the baseline's second time.
        own_threshold: at which PARSE is measured like the others, at every concurrency.
        has_goals: whether these are the models that the project's figures to reach are about.
    """
    baseline = _marks_of(marks, Variant(PLAIN), 0)
    again = _marks_of(marks, Variant(PLAIN), 1)
    figures = tuple(_way_figures(way, timed, looks, marks, baseline) for way in ways)
    noise = None
    if baseline is not None and again is not None:
        noise = paired_test(again.scores, baseline.scores)
    goals = make_goals(figures, timed, own_threshold) if has_goals else ()
    return Comparison(figures, noise, goals)


def _way_figures(
    way: Variant,
    timed: Sequence[ServingRun],
    looks: Sequence[BenchRun],
    marks: Sequence[BenchRun],
    baseline: BenchRun | None,
) -> VariantFigures:
    mine = [item for item in timed if item.variant == way]
    concurrencies = sorted({item.concurrency for item in mine})
    graded = _marks_of(marks, way, 0)
    looked = [look for look in looks if look.variant == way]
    return VariantFigures(
        server=way.server,
        threshold=way.threshold,
        speeds=tuple(_speed_at(way, timed, concurrency) for concurrency in concurrencies),
        quality=None if graded is None else quality_of(graded, baseline),
        accept_length=None if graded is None else accept_length(graded.answers),
        time=_where_time_goes(looked) if looked else None,
    )


def _marks_of(marks: Sequence[BenchRun], way: Variant, run: int) -> BenchRun | None:
    return next((leg for leg in marks if (leg.variant, leg.run) == (way, run)), None)


def _speed_at(way: Variant, timed: Sequence[ServingRun], concurrency: int) -> SpeedAt:
    here = [item for item in timed if item.concurrency == concurrency]
    mine = [item for item in here if item.variant == way]
    others = {name: speedups(here, way, Variant(name)) for name in (PLAIN, STANDALONE, EAGLE3)}
    return SpeedAt(
        concurrency=concurrency,
        tokens_per_s=Spread.of(item.tokens_per_s for item in mine),
        over={name: Spread.of(ratios) for name, ratios in others.items() if ratios},
        latency_ms={
            kind: {p: median(item.latency_ms[kind][p] for item in mine) for p in PERCENTILES}
            for kind in LATENCIES
        },
    )


def accept_length(answers: Sequence[Answer]) -> float | None:
    """Tokens per verification pass; None without passes.

    Stock speculation: output tokens, the prefill's apart, as SGLang counts its accept length.
    PARSE: draft tokens that were kept.
    """
    if all(answer.parse for answer in answers):
        kept = sum(answer.parse["accepted_tokens"] for answer in answers)
        passes = sum(answer.parse["rounds"] for answer in answers)
    else:
        kept = sum(answer.output_tokens - len(answer.texts) for answer in answers)
        passes = sum(answer.meta.get("spec_verify_ct") or 0 for answer in answers)
    return kept / passes if passes else None


def _where_time_goes(looks: Sequence[BenchRun]) -> WhereTimeGoes:
    return WhereTimeGoes(
        ms_per_request=stage_ms(looks),
        draft_share=per_token(looks, "accepted_tokens"),
        rounds_per_request=per_request(looks, "rounds"),
    )


def make_goals(
    ways: Sequence[VariantFigures], timed: Sequence[ServingRun], own_threshold: float
) -> tuple[Goal, ...]:
    """The figures to reach, for the servers that were measured: at one request at a time, but for
    what blocks are worth where several run."""
    goals = list(_block_goals(timed, own_threshold))
    timed = [item for item in timed if item.concurrency == 1]
    for name in (STANDALONE, EAGLE3):
        ratios = speedups(timed, Variant(PARSE, own_threshold), Variant(name))
        if ratios:
            title = f"PARSE over {TITLES[name]}"
            goals.append(Goal(title, median(ratios), "at least", MIN_OVER_STOCK))
    return (*goals, *_composition_goals(ways, timed))


def _block_goals(timed: Sequence[ServingRun], own_threshold: float) -> Iterable[Goal]:
    """A draft that writes several tokens a forward against the same one, token by token."""
    blocks, one = Variant(PARSE, own_threshold), Variant(PARSE_ONE, own_threshold)
    for concurrency in sorted({item.concurrency for item in timed} - {1}):
        ratios = speedups([i for i in timed if i.concurrency == concurrency], blocks, one)
        if ratios:
            name = f"PARSE over the same, draft token by token, at {concurrency} requests"
            yield Goal(name, median(ratios), "at least", MIN_OVER_ONE)


def _composition_goals(
    ways: Sequence[VariantFigures], timed: Sequence[ServingRun]
) -> Iterable[Goal]:
    """PARSE+EAGLE3 against the better of its two parts in the same run, at every threshold."""
    levels: list[tuple[float, float]] = []
    for figures in ways:
        if figures.server != PARSE_EAGLE3 or figures.time is None:
            continue
        parts = (Variant(PARSE, figures.threshold), Variant(EAGLE3))
        ratios = [speedups(timed, figures.variant, part) for part in parts]
        if not all(ratios):
            continue
        ratio, share = median(map(min, *ratios)), figures.time.draft_share
        levels.append((share, ratio))
        name = f"{TITLES[PARSE_EAGLE3]} over its better part, {share:.0%} accepted"
        yield Goal(f"{name} (threshold {figures.threshold:g})", ratio, "at least", 1.0)
    if levels:
        share, ratio = min(levels, key=lambda level: abs(level[0] - MIDDLE))
        name = f"the same nearest the middle, {share:.0%} accepted: faster than both"
        yield Goal(name, ratio, "above", 1.0)
