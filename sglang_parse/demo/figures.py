"""The demo's legs to figures, all of them medians over the runs. Statistics only.

The limit (``harness.figures``) is a run's own, at one request at a time: t is the plain target's
wall time / its output tokens; r and v are PARSE's draft_ms and verify_ms per output token
over that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from sglang_parse.client.figures import (
    Goal,
    limit_of,
    per_request,
    per_token,
    quotient,
    request_ms,
    rounded,
    runs_of,
    speedups,
    stage_ms,
    tokens_per_s,
)
from sglang_parse.client.records import DRAFT, PARSE, PLAIN, BenchRun, Variant

MIN_SPEEDUP, MIN_LIMIT_SHARE, MIN_SPEEDUP_CONCURRENT = 5.0, 0.9, 1.0
MAX_ACCURACY_LOSS, MIN_ACCURACY_GAIN = 0.01, 0.1


@dataclass(frozen=True, slots=True)
class Speed:
    """At one concurrency.

    Attributes:
        tokens_per_s: output tokens per second.
        ratio: the same / the plain target's in the same run.
        request_ms: wall time of a request, mean of a run.
    """

    tokens_per_s: float
    ratio: float
    request_ms: float


@dataclass(frozen=True, slots=True)
class Stages:
    """Where PARSE's time goes, at one concurrency.

    Attributes:
        draft_share: output tokens that are accepted draft tokens, 0 to 1.
        accepted_of_drafted: draft tokens that were accepted, 0 to 1.
        passes_per_request: verification passes.
        ms_per_request: ms in each stage, by the names of ``STAGES``.
    """

    draft_share: float
    accepted_of_drafted: float
    passes_per_request: float
    ms_per_request: dict[str, float]


@dataclass(frozen=True, slots=True)
class Limit:
    """The cost model; see the module's text.

    Attributes:
        plain_ms_per_token: t, ms per output token of the plain target.
        r: drafting per output token / t.
        v: verification per output token / t.
        a: output tokens that are draft tokens, 0 to 1.
        limit: 1 / (r + v + 1 - a).
        share_reached: PARSE's ratio at one request / the limit.
    """

    plain_ms_per_token: float
    r: float
    v: float
    a: float
    limit: float
    share_reached: float


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """One server. ``stages`` are empty without PARSE.

    Attributes:
        problems: how many were answered.
        accuracy: share with exactly the right answer, 0 to 1.
    """

    problems: int
    accuracy: float
    one: Speed
    concurrent: Speed
    stages_one: Stages | None = None
    stages_concurrent: Stages | None = None


@dataclass(frozen=True, slots=True)
class DemoFigures:
    """Everything the table shows and ``build/demo.json`` holds."""

    servers: dict[str, ServerFigures]
    limit: Limit
    checks: tuple[Goal, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data, floats rounded to 4 places."""
        return rounded(asdict(self) | {"checks": [goal.as_json() for goal in self.checks]})


def make_figures(legs: Sequence[BenchRun], concurrency: int) -> DemoFigures:
    """All figures of a demo.

    Args:
        legs: timed legs (run >= 0) of all three servers at 1 and ``concurrency`` requests, and
            legs for accuracy only (run -1), all graded.

    Raises:
        BenchError: a figure is missing.
    """
    servers = {name: _server_figures(legs, name, concurrency) for name in (PLAIN, DRAFT, PARSE)}
    limit = _limit(legs)
    return DemoFigures(servers, limit, _goals(servers, limit))


def _server_figures(legs: Sequence[BenchRun], name: str, concurrency: int) -> ServerFigures:
    scores = [score or 0 for leg in legs if leg.variant.server == name for score in leg.scores]
    one, many = runs_of(legs, name, 1), runs_of(legs, name, concurrency)
    return ServerFigures(
        problems=len(scores),
        accuracy=fmean(scores),
        one=_speed(one, runs_of(legs, PLAIN, 1)),
        concurrent=_speed(many, runs_of(legs, PLAIN, concurrency)),
        stages_one=_stages(one) if name == PARSE else None,
        stages_concurrent=_stages(many) if name == PARSE else None,
    )


def _speed(legs: Sequence[BenchRun], plain: Sequence[BenchRun]) -> Speed:
    ratios = speedups([*legs, *plain], legs[0].variant, Variant(PLAIN))
    return Speed(tokens_per_s(legs), median(ratios), request_ms(legs))


def _stages(legs: Sequence[BenchRun]) -> Stages:
    return Stages(
        draft_share=per_token(legs, "accepted_tokens"),
        accepted_of_drafted=quotient(legs, "accepted_tokens", "drafted_tokens"),
        passes_per_request=per_request(legs, "rounds"),
        ms_per_request=stage_ms(legs),
    )


def run_limit(parse: BenchRun, plain: BenchRun) -> Limit:
    """The cost model of one run."""
    t = 1e3 / plain.tokens_per_s
    r = parse.per_token("draft_ms") / t
    v = parse.per_token("verify_ms") / t
    a = parse.per_token("accepted_tokens") + parse.per_token("matched_tokens")
    limit = limit_of(r, v, a)
    return Limit(t, r, v, a, limit, parse.tokens_per_s / plain.tokens_per_s / limit)


def _limit(legs: Sequence[BenchRun]) -> Limit:
    pairs = zip(runs_of(legs, PARSE, 1), runs_of(legs, PLAIN, 1), strict=True)
    runs = [asdict(run_limit(*pair)) for pair in pairs]
    return Limit(**{key: median(run[key] for run in runs) for key in runs[0]})


def _goals(servers: dict[str, ServerFigures], limit: Limit) -> tuple[Goal, ...]:
    parse, plain, draft = servers[PARSE], servers[PLAIN], servers[DRAFT]
    loss, gain = plain.accuracy - parse.accuracy, parse.accuracy - draft.accuracy
    least = "at least"
    return (
        Goal("speedup at 1 request", parse.one.ratio, least, MIN_SPEEDUP),
        Goal("share of the limit reached", limit.share_reached, least, MIN_LIMIT_SHARE),
        Goal(
            "speedup at concurrent requests", parse.concurrent.ratio, least, MIN_SPEEDUP_CONCURRENT
        ),
        Goal("accuracy lost against the target", loss, "at most", MAX_ACCURACY_LOSS),
        Goal("accuracy gained over the draft", gain, least, MIN_ACCURACY_GAIN),
    )
