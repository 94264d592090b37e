"""Legs of the speed benchmark to figures, all of them medians over the runs. Pure.

The limit (``harness.figures``) is of one concurrency: t is the plain target's time per output
token, all requests together; r is the draft's own on its server / t; v is PARSE's verification_ms
per output token on a server that always drafts / t; a is the share of every draft that is kept, as
asked for. PARSE is faster than that where its off switch leaves drafting out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_parse.bench.harness.figures import (
    Goal,
    legs_of,
    limit_of,
    per_token,
    quotient,
    request_ms,
    stage_ms,
    tokens_per_s,
)
from sglang_parse.bench.harness.kv_log import Held
from sglang_parse.bench.harness.records import DRAFT, PLAIN, Leg
from sglang_parse.bench.limit.bounds import Bound, Card
from sglang_parse.bench.limit.settings import server_at

SPEEDUPS = {1: 4.5, 8: 2.5, 64: 1.4}
"""To reach on one H200: concurrency -> ratio to plain where all of every draft is kept."""
LIMIT_SHARE, NOTHING_KEPT, PASS_OVER_PREFILL, PASS_PREFIXES = 0.95, 0.98, 1.15, 16


@dataclass(frozen=True, slots=True)
class SpeedAt:
    """PARSE at one fraction and concurrency.

    Attributes:
        acceptance: share of every draft that is kept, as asked for.
        concurrency: requests at a time.
        tokens_per_s, plain_tokens_per_s, draft_tokens_per_s: output tokens per second of PARSE,
            the plain target, the draft alone.
        ratio: PARSE's tokens per second / the plain target's.
        r, v: drafting and verification per output token / the plain target's time for one.
        limit: 1 / (r + v + 1 - acceptance).
        share_of_limit: ratio / limit.
        kept: output tokens that are accepted draft tokens, 0 to 1.
        drafted: draft tokens written per output token.
        request_ms: wall time of a request as its client sees it.
        ms_per_request: a request's share of each stage's time on the server, by stage.
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
        rows: its rows: the last token, the draft and the questions.
        draft_tokens, prefixes, question_tokens: of the request that is judged.
        concurrency: requests that ran when it was timed; more than 1 share a pass.
        ms: what the pass took.
        prefill_ms: what a plain prefill took of as many tokens as the draft and the anchor have.
        prefill_rows_ms: what a plain prefill took of as many tokens as the pass has rows.
        over_prefill, over_prefill_rows: the pass's time / that of the one, of the other.
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
    """Building the mask of a pass.

    Attributes:
        concurrency: requests in the pass.
        entries: how many the mask has.
        ms: what building it took.
    """

    concurrency: int
    entries: int
    ms: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one server.

    Attributes:
        server: which one.
        peak_gib: the most memory it took.
        weights_gib, kv_gib: the target's weights and KV, as SGLang says.
    """

    server: str
    peak_gib: float
    weights_gib: float
    kv_gib: float


@dataclass(frozen=True, slots=True)
class LimitFigures:
    """Everything the table shows; ``card`` and ``bounds`` only with ``--limit``."""

    speeds: tuple[SpeedAt, ...]
    verification: Pass
    masks: tuple[MaskBuild, ...]
    memory: tuple[Memory, ...]
    held: dict[int, Held]
    card: Card | None
    bounds: tuple[Bound, ...]


def speed_at(legs: Sequence[Leg], fraction: float, concurrency: int, price: str) -> SpeedAt:
    """One row of the table; ``price``: the server that v is taken from."""
    own = legs_of(legs, server_at(fraction), concurrency)
    priced = legs_of(legs, price, concurrency)
    plain, draft = (tokens_per_s(legs_of(legs, name, concurrency)) for name in (PLAIN, DRAFT))
    r, v = plain / draft, per_token(priced, "verification_ms") * plain / 1e3
    limit, ratio = limit_of(r, v, fraction), tokens_per_s(own) / plain
    return SpeedAt(
        acceptance=fraction,
        concurrency=concurrency,
        tokens_per_s=tokens_per_s(own),
        plain_tokens_per_s=plain,
        draft_tokens_per_s=draft,
        ratio=ratio,
        r=r,
        v=v,
        limit=limit,
        share_of_limit=ratio / limit,
        kept=per_token(own, "accepted_tokens"),
        drafted=per_token(own, "drafted_tokens"),
        request_ms=request_ms(own),
        ms_per_request=stage_ms(own),
    )


def run_ms(legs: Sequence[Leg], concurrency: int, price: str) -> dict[str, float]:
    """Time of one run of each stage, in which all requests take part; ``price`` as above."""
    priced = legs_of(legs, price, concurrency)
    return {
        "draft step": concurrency * quotient(priced, "draft_ms", "drafted_tokens"),
        "decode step": 1e3 * concurrency / tokens_per_s(legs_of(legs, PLAIN, concurrency)),
        "verification pass": concurrency * quotient(priced, "verification_ms", "rounds"),
    }


def make_goals(figures: LimitFigures) -> tuple[Goal, ...]:
    """The figures to reach on one H200, as far as they were measured."""
    found = []
    for row in figures.speeds:
        name = f"acceptance {row.acceptance:g}, {row.concurrency} at a time"
        speedup = f"{name}: speedup"
        if row.acceptance == 1 and row.concurrency in SPEEDUPS:
            found.append(Goal(speedup, row.ratio, "at least", SPEEDUPS[row.concurrency]))
        if row.acceptance == 0:
            found.append(Goal(speedup, row.ratio, "at least", NOTHING_KEPT))
        share = f"{name}: share of the limit"
        found.append(Goal(share, row.share_of_limit, "at least", LIMIT_SHARE))
    if (figures.verification.prefixes, figures.verification.concurrency) == (PASS_PREFIXES, 1):
        over = figures.verification.over_prefill
        found.append(Goal("pass / plain prefill", over, "at most", PASS_OVER_PREFILL))
    return tuple(found)
