"""Legs of the speed benchmark to figures, all of them medians over the runs. Pure.

The limit (``harness.figures``) is of one concurrency: t is the plain target's time per output
token, all requests together; r is the draft's own on its server / t; v is PARSE's verify_ms
per output token on a server that always drafts / t; a is the share of every draft that is kept, as
asked for. PARSE is faster than that where its controller leaves drafting out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_parse.client.figures import (
    Goal,
    limit_of,
    per_token,
    quotient,
    request_ms,
    runs_of,
    stage_ms,
    tokens_per_s,
)
from sglang_parse.client.kv_log import Held
from sglang_parse.client.records import DRAFT, BenchRun
from sglang_parse.limit.bounds import Bound, Card
from sglang_parse.limit.settings import LimitSettings, server_at

SPEEDUPS = {1: 4.5, 8: 2.5}
"""To reach on one H200: concurrency -> ratio to plain where all of every draft is kept. With more
at a time a pass's rows keep the card's arithmetic busy, and what they allow is the mark."""
ROWS_SHARE = 0.9
LIMIT_SHARE, NOTHING_KEPT, PASS_OVER_PREFILL, PASS_PREFIXES = 0.95, 0.98, 1.15, 16


@dataclass(frozen=True, slots=True)
class SpeedAt:
    """PARSE at one fraction and concurrency.

    Attributes:
        acceptance: share of every draft that is kept, as asked for.
        concurrency: requests at a time.
        plain: the plain target's fastest server.
        tokens_per_s, plain_tokens_per_s, draft_tokens_per_s: output tokens per second of PARSE,
            the plain target, the draft alone.
        ratio: PARSE's tokens per second / the plain target's.
        r, v: drafting and verification per output token / the plain target's time for one.
        limit: 1 / (r + v + 1 - acceptance); with several drafts an answer
            1 / (r * drafted + v + 1 - kept), v its own.
        share_of_limit: ratio / limit.
        kept: output tokens that are accepted draft tokens, 0 to 1.
        drafted: draft tokens written per output token.
        request_ms: wall time of a request as its client sees it.
        ms_per_request: a request's share of each stage's time on the server, by stage.
    """

    acceptance: float
    concurrency: int
    plain: str
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
        pack_ms: what packing it to bits took, as FlashInfer's plan does it; null elsewhere.
    """

    concurrency: int
    entries: int
    ms: float
    pack_ms: float | None


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


def plain_tokens_per_s(
    legs: Sequence[BenchRun], concurrency: int, settings: LimitSettings
) -> tuple[str, float]:
    """The plain target's fastest server, and its output tokens per second."""
    rates = {name: tokens_per_s(runs_of(legs, name, concurrency)) for name in settings.plain_names}
    best = max(rates, key=lambda name: rates[name])
    return best, rates[best]


def speed_at(
    legs: Sequence[BenchRun], fraction: float, concurrency: int, settings: LimitSettings
) -> SpeedAt:
    """One row of the table.

    Where an answer takes several drafts, the limit is of what was drafted, judged and kept on the
    server itself: what the target writes at the cuts is part of it.
    """
    own = runs_of(legs, server_at(fraction), concurrency)
    best, plain = plain_tokens_per_s(legs, concurrency, settings)
    r = plain / tokens_per_s(runs_of(legs, DRAFT, concurrency))
    priced = own if settings.has_rounds else runs_of(legs, settings.price, concurrency)
    v = per_token(priced, "verify_ms") * plain / 1e3
    kept, drafted = per_token(own, "accepted_tokens"), per_token(own, "drafted_tokens")
    limit = limit_of(r * drafted, v, kept) if settings.has_rounds else limit_of(r, v, fraction)
    ratio = tokens_per_s(own) / plain
    return SpeedAt(
        acceptance=fraction,
        concurrency=concurrency,
        tokens_per_s=tokens_per_s(own),
        plain=best,
        plain_tokens_per_s=plain,
        draft_tokens_per_s=plain / r,
        ratio=ratio,
        r=r,
        v=v,
        limit=limit,
        share_of_limit=ratio / limit,
        kept=kept,
        drafted=drafted,
        request_ms=request_ms(own),
        ms_per_request=stage_ms(own),
    )


def run_ms(legs: Sequence[BenchRun], concurrency: int, settings: LimitSettings) -> dict[str, float]:
    """Time of one run of each stage, in which all requests take part."""
    priced = runs_of(legs, settings.price, concurrency)
    return {
        "draft step": concurrency * quotient(priced, "draft_ms", "drafted_tokens"),
        "decode step": 1e3 * concurrency / plain_tokens_per_s(legs, concurrency, settings)[1],
        "verification pass": concurrency * quotient(priced, "verify_ms", "rounds"),
    }


def what_rows_allow(row: SpeedAt, verification: Pass) -> float:
    """The speedup of a server whose passes cost what plain prefills of as many rows do, and which
    takes no other time than the draft's own."""
    rows_per_token = verification.rows / verification.draft_tokens
    ms_per_row = verification.prefill_rows_ms / verification.rows
    draft_ms, plain_ms = 1e3 / row.draft_tokens_per_s, 1e3 / row.plain_tokens_per_s
    return plain_ms / (draft_ms + rows_per_token * ms_per_row)


def make_goals(figures: LimitFigures) -> tuple[Goal, ...]:
    """The figures to reach on one H200, as far as they were measured."""
    found = []
    for row in figures.speeds:
        name = f"acceptance {row.acceptance:g}, {row.concurrency} at a time"
        speedup = f"{name}: speedup"
        if row.acceptance == 1:
            rows = ROWS_SHARE * what_rows_allow(row, figures.verification)
            mark = SPEEDUPS.get(row.concurrency, rows)
            found.append(Goal(speedup, row.ratio, "at least", mark))
        if row.acceptance == 0:
            found.append(Goal(speedup, row.ratio, "at least", NOTHING_KEPT))
        share = f"{name}: share of the limit"
        found.append(Goal(share, row.share_of_limit, "at least", LIMIT_SHARE))
    if (figures.verification.prefixes, figures.verification.concurrency) == (PASS_PREFIXES, 1):
        over = figures.verification.over_prefill_rows
        name = "pass / plain prefill of as many rows"
        found.append(Goal(name, over, "at most", PASS_OVER_PREFILL))
    return tuple(found)
