"""Legs to figures. Pure statistics.

Notation, per run, at one request at a time:
    t  ms per output token of the plain target: its wall time / its output tokens, prefill included
    r  PARSE's draft_ms per output token / t
    v  PARSE's verification_ms per output token / t
    a  accepted draft tokens / output tokens
The limit 1 / (r + v + 1 - a) is the ratio PARSE would reach if nothing but drafting, verification
and the target's own tokens took time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from sglang_parse.bench.demo.records import DRAFT, PARSE, PLAIN, DemoError, Leg

STAGES = ("prefill", "draft", "verification", "continuation")
MIN_SPEEDUP, MIN_LIMIT_SHARE, MIN_SPEEDUP_CONCURRENT = 2.0, 0.85, 1.0
MAX_ACCURACY_LOSS, MIN_ACCURACY_GAIN = 0.01, 0.10


@dataclass(frozen=True, slots=True)
class Speed:
    """Medians over the runs, at one concurrency.

    Attributes:
        tokens_per_s: output tokens per second.
        ratio: tokens_per_s / the plain target's in the same run.
        request_ms: wall time of a request, mean of a run.
    """

    tokens_per_s: float
    ratio: float
    request_ms: float


@dataclass(frozen=True, slots=True)
class Stages:
    """Where PARSE's time goes, medians over the runs, at one concurrency.

    Attributes:
        draft_share: output tokens that are accepted draft tokens, 0 to 1.
        accepted_of_drafted: draft tokens that were accepted, 0 to 1.
        passes_per_request: verification passes.
        ms_per_request: stage -> ms, the stages of ``STAGES``.
    """

    draft_share: float
    accepted_of_drafted: float
    passes_per_request: float
    ms_per_request: dict[str, float]


@dataclass(frozen=True, slots=True)
class Limit:
    """The cost model, medians over the runs; see the module's notation."""

    plain_ms_per_token: float
    r: float
    v: float
    a: float
    limit: float
    share_reached: float


@dataclass(frozen=True, slots=True)
class Check:
    """One figure to reach."""

    name: str
    value: float
    wanted: str
    reached: bool


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """One server. ``stages`` are empty without PARSE."""

    problems: int
    accuracy: float
    one: Speed
    concurrent: Speed
    stages_one: Stages | None = None
    stages_concurrent: Stages | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything the table shows and ``build/demo.json`` holds."""

    servers: dict[str, ServerFigures]
    limit: Limit
    checks: tuple[Check, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data, floats rounded to 4 places."""
        return rounded(asdict(self))


def make_figures(legs: Sequence[Leg], concurrency: int) -> Figures:
    """All figures of a demo.

    Args:
        legs: timed legs (run >= 0) of all three servers at 1 and ``concurrency`` requests, and
            legs for accuracy only (run -1).

    Raises:
        DemoError: a figure is missing.
    """
    servers = {name: _server_figures(legs, name, concurrency) for name in (PLAIN, DRAFT, PARSE)}
    limit = _limit(legs)
    return Figures(servers, limit, _checks(servers, limit))


def _server_figures(legs: Sequence[Leg], name: str, concurrency: int) -> ServerFigures:
    right = [answer.is_right for leg in legs if leg.server == name for answer in leg.answers]
    with_stages = name == PARSE
    return ServerFigures(
        problems=len(right),
        accuracy=fmean(right),
        one=_speed(legs, name, 1),
        concurrent=_speed(legs, name, concurrency),
        stages_one=_stages(_timed(legs, name, 1)) if with_stages else None,
        stages_concurrent=_stages(_timed(legs, name, concurrency)) if with_stages else None,
    )


def _timed(legs: Iterable[Leg], name: str, concurrency: int) -> list[Leg]:
    """The timed legs of one server, one per run, in the order of the runs."""
    found = [leg for leg in legs if (leg.server, leg.concurrency) == (name, concurrency)]
    found = sorted((leg for leg in found if leg.run >= 0), key=lambda leg: leg.run)
    if not found or any(not leg.output_tokens for leg in found):
        raise DemoError(f"no timed answers of {name!r} at {concurrency} requests at a time")
    return found


def _pairs(legs: Sequence[Leg], name: str, concurrency: int) -> list[tuple[Leg, Leg]]:
    """(leg, the plain target's leg) of the same run."""
    plain = {leg.run: leg for leg in _timed(legs, PLAIN, concurrency)}
    return [(leg, plain[leg.run]) for leg in _timed(legs, name, concurrency)]


def _speed(legs: Sequence[Leg], name: str, concurrency: int) -> Speed:
    pairs = _pairs(legs, name, concurrency)
    return Speed(
        tokens_per_s=median(leg.tokens_per_s for leg, _ in pairs),
        ratio=median(leg.tokens_per_s / plain.tokens_per_s for leg, plain in pairs),
        request_ms=median(fmean(answer.wall_ms for answer in leg.answers) for leg, _ in pairs),
    )


def _stages(legs: Sequence[Leg]) -> Stages:
    return Stages(
        draft_share=median(leg.per_token("accepted_tokens") for leg in legs),
        accepted_of_drafted=median(
            leg.per_request("accepted_tokens") / max(leg.per_request("drafted_tokens"), 1e-9)
            for leg in legs
        ),
        passes_per_request=median(leg.per_request("rounds") for leg in legs),
        ms_per_request={
            stage: median(leg.per_request(f"{stage}_ms") for leg in legs) for stage in STAGES
        },
    )


def run_limit(parse: Leg, plain: Leg) -> Limit:
    """The cost model of one run."""
    t = 1e3 * plain.seconds / plain.output_tokens
    r = parse.per_token("draft_ms") / t
    v = parse.per_token("verification_ms") / t
    a = parse.per_token("accepted_tokens")
    cost = r + v + 1 - a
    if not cost > 0:
        raise DemoError(f"stage times give no limit: r {r:.3f}, v {v:.3f}, a {a:.3f}")
    return Limit(t, r, v, a, 1 / cost, parse.tokens_per_s / plain.tokens_per_s * cost)


def _limit(legs: Sequence[Leg]) -> Limit:
    runs = [asdict(run_limit(*pair)) for pair in _pairs(legs, PARSE, 1)]
    return Limit(**{key: median(run[key] for run in runs) for key in runs[0]})


def _checks(servers: dict[str, ServerFigures], limit: Limit) -> tuple[Check, ...]:
    parse, plain, draft = servers[PARSE], servers[PLAIN], servers[DRAFT]
    loss, gain = plain.accuracy - parse.accuracy, parse.accuracy - draft.accuracy
    return (
        _at_least("speedup at 1 request", parse.one.ratio, MIN_SPEEDUP),
        _at_least("share of the limit reached", limit.share_reached, MIN_LIMIT_SHARE),
        _at_least("speedup at concurrent requests", parse.concurrent.ratio, MIN_SPEEDUP_CONCURRENT),
        Check(
            "accuracy lost against the target",
            loss,
            f"at most {MAX_ACCURACY_LOSS}",
            # A hair of slack: 0.97 - 0.96 is more than 0.01 in floating point.
            loss <= MAX_ACCURACY_LOSS + 1e-9,
        ),
        _at_least("accuracy gained over the draft", gain, MIN_ACCURACY_GAIN),
    )


def _at_least(name: str, value: float, wanted: float) -> Check:
    return Check(name, value, f"at least {wanted}", value >= wanted - 1e-9)


def rounded(value: Any) -> Any:
    """Plain data with its floats rounded to 4 places."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return value
