"""Legs of the speed benchmark to figures. Pure.

Notation, at one concurrency; medians over the runs:
    t  ms per output token of the plain target, all requests together, prefill included
    r  ms per output token of the draft alone on its own server / t
    v  verification ms per output token of PARSE on a server that always drafts / t
    a  share of every draft that is kept, as asked for
Without any other cost, and drafting always, PARSE would be 1 / (r + v + 1 - a) times as fast as
the plain target. It is faster than that where its off switch leaves drafting out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from sglang_parse.bench.demo.figures import STAGES, Check
from sglang_parse.bench.demo.records import DRAFT, PLAIN, DemoError, Leg
from sglang_parse.bench.kv import Held
from sglang_parse.bench.limit.limits import Bound, Card
from sglang_parse.bench.limit.speed_settings import server_at

SPEEDUPS = {1: 4.5, 8: 2.5, 64: 1.4}
"""To reach on one H200: concurrency -> ratio to plain where all of every draft is kept."""
LIMIT_SHARE, NOTHING_KEPT, PASS_OVER_PREFILL, PASS_PREFIXES = 0.95, 0.98, 1.15, 16


@dataclass(frozen=True, slots=True)
class Speed:
    """PARSE at one fraction and concurrency.

    Attributes:
        tokens_per_s, plain_tokens_per_s, draft_tokens_per_s: output tokens per second.
        ratio: to the plain target.
        share_of_limit: ratio / limit.
        kept: output tokens that are accepted draft tokens, 0 to 1.
        drafted: draft tokens written per output token.
        request_ms: wall time of a request as its client sees it.
        ms_per_request: stage -> a request's share of the stage's time on the server.
    """

    acceptance: float
    concurrency: int
    tokens_per_s: float
    plain_tokens_per_s: float
    draft_tokens_per_s: float
    ratio: float
    r: float
    v: float
    limit: float
    share_of_limit: float
    kept: float
    drafted: float
    request_ms: float
    ms_per_request: dict[str, float]


@dataclass(frozen=True, slots=True)
class Pass:
    """One verification pass of one request against plain prefills behind the same prompt.

    Attributes:
        rows: of the pass: the anchor, the draft and the questions.
        concurrency: requests that ran when it was timed; more than 1 share a pass.
        prefill_ms: of as many tokens as the draft and the anchor have.
        prefill_rows_ms: of as many tokens as the pass has rows.
    """

    rows: int
    draft_tokens: int
    prefixes: int
    question_tokens: int
    concurrency: int
    ms: float
    prefill_ms: float
    prefill_rows_ms: float

    @property
    def over_prefill(self) -> float:
        return self.ms / self.prefill_ms

    @property
    def over_prefill_rows(self) -> float:
        return self.ms / self.prefill_rows_ms


@dataclass(frozen=True, slots=True)
class MaskBuild:
    """Building the mask of a pass with this many requests."""

    concurrency: int
    entries: int
    ms: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one server. ``peak_gib``: see ``speed_memory``; the others as SGLang says."""

    server: str
    peak_gib: float
    weights_gib: float
    kv_gib: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything the table shows; ``card`` and ``bounds`` only with ``--limit``."""

    speeds: tuple[Speed, ...]
    verification: Pass
    masks: tuple[MaskBuild, ...]
    memory: tuple[Memory, ...]
    held: dict[int, Held]
    card: Card | None
    bounds: tuple[Bound, ...]


def legs_of(legs: Sequence[Leg], server: str, concurrency: int) -> list[Leg]:
    """The timed legs. Raises: DemoError, when there is none."""
    found = [leg for leg in legs if (leg.server, leg.concurrency) == (server, concurrency)]
    if not found:
        raise DemoError(f"nothing was measured of {server} at {concurrency} requests at a time")
    return found


def tokens_per_s(legs: Sequence[Leg], server: str, concurrency: int) -> float:
    """Median over the runs."""
    return median(leg.tokens_per_s for leg in legs_of(legs, server, concurrency))


def median_of(legs: Sequence[Leg], server: str, concurrency: int, over: str, under: str) -> float:
    """Median over the runs of one figure of ``meta_info["parse"]`` over another, both summed."""
    chosen = legs_of(legs, server, concurrency)
    return median(leg.per_request(over) / max(leg.per_request(under), 1e-9) for leg in chosen)


def limit(r: float, v: float, a: float) -> float:
    """The speedup that r, v and a allow; see the module's notation."""
    return 1 / (r + v + 1 - a)


def speed(legs: Sequence[Leg], fraction: float, concurrency: int, price: str) -> Speed:
    """One row of the table; ``price``: the server that v is taken from."""
    plain, draft, parse = (
        tokens_per_s(legs, name, concurrency) for name in (PLAIN, DRAFT, server_at(fraction))
    )
    priced = legs_of(legs, price, concurrency)
    v = median(leg.per_token("verification_ms") for leg in priced) * plain / 1e3
    at_best = limit(plain / draft, v, fraction)
    own = legs_of(legs, server_at(fraction), concurrency)
    return Speed(
        acceptance=fraction,
        concurrency=concurrency,
        tokens_per_s=parse,
        plain_tokens_per_s=plain,
        draft_tokens_per_s=draft,
        ratio=parse / plain,
        r=plain / draft,
        v=v,
        limit=at_best,
        share_of_limit=parse / plain / at_best,
        kept=median(leg.per_token("accepted_tokens") for leg in own),
        drafted=median(leg.per_token("drafted_tokens") for leg in own),
        request_ms=median(fmean(answer.wall_ms for answer in leg.answers) for leg in own),
        ms_per_request={
            stage: median(leg.per_request(f"{stage}_ms") for leg in own) for stage in STAGES
        },
    )


def stage_ms(legs: Sequence[Leg], concurrency: int, price: str) -> dict[str, float]:
    """Time of one run of each stage, in which all requests take part; ``price`` as above."""
    step = 1e3 * concurrency / tokens_per_s(legs, PLAIN, concurrency)
    burst = median_of(legs, price, concurrency, "draft_ms", "drafted_tokens")
    verification = median_of(legs, price, concurrency, "verification_ms", "rounds")
    return {
        "draft step": concurrency * burst,
        "decode step": step,
        "verification pass": concurrency * verification,
    }


def checks(figures: Figures) -> tuple[Check, ...]:
    """The figures to reach on one H200, as far as they were measured."""
    found = []
    for row in figures.speeds:
        name = f"acceptance {row.acceptance:g}, {row.concurrency} at a time"
        if row.acceptance == 1 and row.concurrency in SPEEDUPS:
            found.append(_at_least(f"{name}: speedup", row.ratio, SPEEDUPS[row.concurrency]))
        if row.acceptance == 0:
            found.append(_at_least(f"{name}: speedup", row.ratio, NOTHING_KEPT))
        found.append(_at_least(f"{name}: share of the limit", row.share_of_limit, LIMIT_SHARE))
    if (figures.verification.prefixes, figures.verification.concurrency) == (PASS_PREFIXES, 1):
        value = figures.verification.over_prefill
        wanted = f"at most {PASS_OVER_PREFILL}"
        found.append(Check("pass / plain prefill", value, wanted, value <= PASS_OVER_PREFILL))
    return tuple(found)


def _at_least(name: str, value: float, wanted: float) -> Check:
    return Check(name, value, f"at least {wanted}", value >= wanted)
