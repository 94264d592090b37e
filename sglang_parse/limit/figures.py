"""Runs of the speed benchmark to figures, all of them medians over the runs. Pure.

The limit (``client.figures``) is of one concurrency. t is the plain target's time per output
token, all requests together. r is the draft's time per token on its own server / t. v is the
verify_ms per output token of a PARSE server that always drafts / t. a is the simulated acceptance.
PARSE exceeds this limit where its adaptive policy suspends drafting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from sglang_parse.client.figures import limit_of, per_token, stage_ms
from sglang_parse.client.records import DRAFT, BenchError, BenchRun
from sglang_parse.limit.settings import LimitSettings, server_at


@dataclass(frozen=True, slots=True)
class SpeedAt:
    """PARSE at one simulated acceptance and concurrency.

    Attributes:
        acceptance: simulated accepted fraction of every draft.
        concurrency: requests at a time.
        plain: the fastest server of the plain target.
        tokens_per_s, plain_tokens_per_s, draft_tokens_per_s: output tokens per second of PARSE,
            the plain target, the draft alone.
        speedup: PARSE's tokens per second / the plain target's.
        r, v: drafting and verification per output token / the plain target's time for one.
        limit: 1 / (r + v + 1 - acceptance); with several drafts per answer
            1 / (r * drafted + v + 1 - accepted), with its own v.
        limit_fraction: speedup / limit.
        accepted: accepted draft tokens per output token.
        drafted: draft tokens per output token.
        ms_per_request: a request's fraction of each stage's time on the server, by stage.
    """

    acceptance: float
    concurrency: int
    plain: str
    tokens_per_s: float
    plain_tokens_per_s: float
    draft_tokens_per_s: float
    speedup: float
    r: float
    v: float
    limit: float
    limit_fraction: float
    accepted: float
    drafted: float
    ms_per_request: dict[str, float]


@dataclass(frozen=True, slots=True)
class VerifyTime:
    """One verify pass of one request and plain prefills after the same prompt.

    Attributes:
        rows: rows of the pass: the last token, the draft and the questions.
        draft_tokens, prefixes, question_tokens: of the verified request.
        concurrency: requests that ran when it was timed; more than 1 share a pass.
        ms: time of the pass.
        prefill_ms: of a plain prefill of the draft and the last token.
        prefill_rows_ms: of a plain prefill of as many tokens as the pass has rows.
    """

    rows: int
    draft_tokens: int
    prefixes: int
    question_tokens: int
    concurrency: int
    ms: float
    prefill_ms: float
    prefill_rows_ms: float


@dataclass(frozen=True, slots=True)
class LimitFigures:
    """All figures."""

    speeds: tuple[SpeedAt, ...]
    verify: VerifyTime


def speed_at(
    runs: Sequence[BenchRun], fraction: float, concurrency: int, settings: LimitSettings
) -> SpeedAt:
    """Computes one row of the table.

    Where an answer takes several drafts, the limit is of what the server itself drafted, verified
    and accepted: it includes the tokens that the target decodes after rejections.
    """
    served = runs_of(runs, server_at(fraction), concurrency)
    plain, best = max(
        (tokens_per_s(runs_of(runs, name, concurrency)), name) for name in settings.plain_names
    )
    draft = tokens_per_s(runs_of(runs, DRAFT, concurrency))
    costs = served if settings.has_rounds else runs_of(runs, settings.cost_server, concurrency)
    r, v = plain / draft, per_token(costs, "verify_ms") * plain / 1e3
    accepted, drafted = per_token(served, "accepted_tokens"), per_token(served, "drafted_tokens")
    limit = limit_of(r * drafted, v, accepted) if settings.has_rounds else limit_of(r, v, fraction)
    speedup = tokens_per_s(served) / plain
    return SpeedAt(
        acceptance=fraction,
        concurrency=concurrency,
        plain=best,
        tokens_per_s=tokens_per_s(served),
        plain_tokens_per_s=plain,
        draft_tokens_per_s=draft,
        speedup=speedup,
        r=r,
        v=v,
        limit=limit,
        limit_fraction=speedup / limit,
        accepted=accepted,
        drafted=drafted,
        ms_per_request=stage_ms(served),
    )


def runs_of(runs: Sequence[BenchRun], server: str, concurrency: int) -> list[BenchRun]:
    """The timed runs of a server at a concurrency.

    Raises:
        BenchError: there is none, or one without answers.
    """
    found = [run for run in runs if (run.variant.server, run.concurrency) == (server, concurrency)]
    if not found or any(not run.output_tokens for run in found):
        raise BenchError(f"nothing was measured of {server} at {concurrency} requests at a time")
    return found


def tokens_per_s(runs: Sequence[BenchRun]) -> float:
    """Median over the runs."""
    return median(run.tokens_per_s for run in runs)


def quotient(runs: Sequence[BenchRun], over: str, under: str) -> float:
    """Median over the runs of one counter of ``meta_info["parse"]`` over another, both summed."""
    return median(run.per_request(over) / max(run.per_request(under), 1e-9) for run in runs)
