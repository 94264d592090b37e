"""Runs of ``bench_serving``, traced runs and graded runs to figures.

A speedup is the quotient of two variants' output tokens per second in the same run: same problems,
minutes apart. Medians are over the runs; ranges are from the smallest run to the largest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from sglang_parse.client.records import (
    PERCENTILES,
    STAGES,
    Answer,
    BenchRun,
    ServingRun,
    Variant,
    has_parse,
)
from sglang_parse.client.statistics import (
    PairedTest,
    Proportion,
    costs_of,
    is_binary,
    limit_of,
    paired_test,
    speedups,
)


@dataclass(frozen=True)
class Measured:
    """Runs of ``bench_serving``; answers one at a time with their ``meta_info``, for stage times;
    answers with scores, where run 1 is the baseline's second time."""

    serving: list[ServingRun] = field(default_factory=list)
    traced: list[BenchRun] = field(default_factory=list)
    graded: list[BenchRun] = field(default_factory=list)

    def drop(self, server: str) -> None:
        self.serving[:] = [run for run in self.serving if run.variant.server != server]
        self.traced[:] = [run for run in self.traced if run.variant.server != server]

    def graded_run(self, variant: Variant, run: int = 0) -> BenchRun | None:
        found = (one for one in self.graded if (one.variant, one.run) == (variant, run))
        return next(found, None)

    def at(self, concurrency: int) -> list[ServingRun]:
        return [run for run in self.serving if run.concurrency == concurrency]


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        values = list(values)
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class SpeedAt:
    """One variant at one concurrency.

    Attributes:
        concurrency: requests at a time.
        tokens_per_s: output tokens per second: median, low and high of the runs.
        over: other server -> speedup over it, likewise, for servers measured at this concurrency.
        latency_ms: latency -> percentile -> median over the runs.
        stages: stage -> fraction of the time, all requests of the server together; median over the
            runs. Empty where the server publishes no metrics of PARSE.
        rows_per_pass, ms_per_pass: rows and time of verified drafts per verify pass, medians over
            the runs; null without a pass.
    """

    concurrency: int
    tokens_per_s: Spread
    over: dict[str, Spread]
    latency_ms: dict[str, dict[str, float]]
    stages: dict[str, float]
    rows_per_pass: float | None = None
    ms_per_pass: float | None = None


@dataclass(frozen=True, slots=True)
class Quality:
    """Scores of one variant.

    Attributes:
        problems: graded answers, or all where none could be graded.
        score: mean, 0 to 1: the fraction of right answers for most tasks; None if not graded.
        interval: exact 95 % (Clopper and Pearson), for right and wrong answers only.
        test: against the baseline's first pass.
    """

    problems: int
    score: float | None
    interval: tuple[float, float] | None
    test: PairedTest | None


@dataclass(frozen=True, slots=True)
class WhereTimeGoes:
    """PARSE's time per request, one at a time.

    Attributes:
        ms_per_request: ms in each stage, medians over the runs.
        draft_fraction: output tokens that are draft tokens accepted by a verdict, 0 to 1.
        matched_fraction: output tokens after these that are draft tokens, too, because the target
            chose the same.
        rounds_per_request: drafts verified per request.
        limit: speedup if nothing but drafting, verification and the target's tokens took time;
            null without the plain target.
        per_request: number of ``meta_info["parse"]`` -> its mean.
    """

    ms_per_request: dict[str, float]
    draft_fraction: float
    matched_fraction: float
    rounds_per_request: float
    limit: float | None
    per_request: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantFigures(Variant):
    """All figures of a variant; ``time`` is None without PARSE.

    Attributes:
        accept_length: tokens per verify pass; of PARSE's answers that came with their counters, of
            stock servers by SGLang's count. None without speculation.
    """

    speeds: tuple[SpeedAt, ...]
    quality: Quality | None
    accept_length: float | None
    time: WhereTimeGoes | None

    @property
    def variant(self) -> Variant:
        return Variant(self.server, self.threshold, self.off_fraction, self.group)

    def speed_at(self, concurrency: int) -> SpeedAt | None:
        return next((speed for speed in self.speeds if speed.concurrency == concurrency), None)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything the page shows. ``noise``: the baseline against itself, answered twice."""

    variants: tuple[VariantFigures, ...]
    noise: PairedTest | None

    def find(self, variant: Variant) -> VariantFigures | None:
        return next((figures for figures in self.variants if figures.variant == variant), None)


def make_comparison(measured: Measured, servers: Sequence[str], baseline: str) -> Comparison:
    """All figures, of servers in the order of the page; answers are compared with ``baseline``."""
    found = {run.variant for run in measured.serving}
    found |= {run.variant for run in (*measured.traced, *measured.graded)}
    variants = sorted(found, key=lambda one: _place(one, servers))
    first, again = (measured.graded_run(Variant(baseline), run) for run in (0, 1))
    noise = paired_test(again.scores, first.scores) if first and again else None
    figures = tuple(_figures_of(variant, measured, servers, baseline) for variant in variants)
    return Comparison(figures, noise)


def _place(variant: Variant, servers: Sequence[str]) -> tuple:
    threshold = -1.0 if variant.threshold is None else variant.threshold
    return servers.index(variant.server), threshold, variant.off_fraction, variant.group


def _figures_of(
    variant: Variant, measured: Measured, servers: Sequence[str], baseline: str
) -> VariantFigures:
    mine = sorted({run.concurrency for run in measured.serving if run.variant == variant})
    graded = measured.graded_run(variant)
    traced = [run for run in measured.traced if run.variant == variant]
    has_time = traced and has_parse(variant.server)
    reference = measured.graded_run(Variant(baseline))
    return VariantFigures(
        **asdict(variant),
        speeds=tuple(_speed_at(variant, measured.at(c), c, servers) for c in mine),
        quality=None if graded is None else quality_of(graded, reference),
        accept_length=_accept_length(variant, measured),
        time=_where_time_goes(traced, measured.at(1), Variant(baseline)) if has_time else None,
    )


def quality_of(graded: BenchRun, baseline: BenchRun | None) -> Quality:
    """Scores of a run, tested against the baseline's unless they are its own."""
    scores = [score for score in graded.scores if score is not None]
    if not scores:
        return Quality(len(graded.scores), None, None, None)
    interval = None
    if is_binary(scores):
        right = Proportion.of(round(sum(scores)), len(scores))
        interval = (right.low, right.high)
    test = None
    if baseline is not None and baseline.variant != graded.variant:
        # A sweep may answer only the first of the problems.
        test = paired_test(graded.scores, baseline.scores[: len(graded.scores)])
    return Quality(len(scores), fmean(scores), interval, test)


def _speed_at(
    variant: Variant, runs: Sequence[ServingRun], concurrency: int, servers: Sequence[str]
) -> SpeedAt:
    mine = [run for run in runs if run.variant == variant]
    others = [Variant(server) for server in servers if Variant(server) != variant]
    over = {other.server: speedups(runs, variant, other) for other in others}
    known = [run.stages for run in mine if run.stages]
    return SpeedAt(
        concurrency=concurrency,
        tokens_per_s=Spread.of(run.tokens_per_s for run in mine),
        over={name: Spread.of(ratios) for name, ratios in over.items() if ratios},
        latency_ms={
            kind: {p: median(run.latency_ms[kind][p] for run in mine) for p in PERCENTILES}
            for kind in mine[0].latency_ms
        },
        stages={s: median(stages.get(s, 0.0) for stages in known) for s in STAGES if known},
        rows_per_pass=_median(run.rows_per_pass for run in mine),
        ms_per_pass=_median(run.ms_per_pass for run in mine),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _accept_length(variant: Variant, measured: Measured) -> float | None:
    if not has_parse(variant.server):
        counted: Sequence[BenchRun | ServingRun] = (*measured.serving, *measured.traced)
        return _median(run.accept_length for run in counted if run.variant == variant)
    runs = (run for run in (*measured.graded, *measured.traced) if run.variant == variant)
    return accept_length([answer for run in runs for answer in run.answers])


def accept_length(answers: Sequence[Answer]) -> float | None:
    """Tokens per verify pass of PARSE, the bonus token included as in SGLang, whose own count takes
    each iteration of PARSE for a verification. Of answers that have PARSE's counters."""
    counted = [answer.parse for answer in answers if answer.parse]
    passes = sum(one["rounds"] for one in counted)
    tokens = sum(one["accepted_tokens"] + one["matched_tokens"] for one in counted)
    return 1 + tokens / passes if passes else None


def _where_time_goes(
    traced: Sequence[BenchRun], serving: Sequence[ServingRun], plain: Variant
) -> WhereTimeGoes:
    plain_ms = {run.run: 1e3 / run.tokens_per_s for run in serving if run.variant == plain}
    known = [(run, plain_ms[run.run]) for run in traced if run.run in plain_ms]

    def per_request(key: str) -> float:
        return median(run.per_request(key) for run in traced)

    return WhereTimeGoes(
        ms_per_request={stage: per_request(f"{stage}_ms") for stage in STAGES},
        draft_fraction=median(run.per_token("accepted_tokens") for run in traced),
        matched_fraction=median(run.per_token("matched_tokens") for run in traced),
        rounds_per_request=per_request("rounds"),
        limit=_median(limit_of(*costs_of(run, t)) for run, t in known),
        per_request=_means([answer.parse for run in traced for answer in run.answers]),
    )


def _means(counters: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of the numbers that all answers have."""
    first = counters[0] if counters else {}
    names = [n for n in first if all(isinstance(one.get(n), int | float) for one in counters)]
    return {name: fmean(one[name] for one in counters) for name in names}
