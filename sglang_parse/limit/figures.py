"""Runs of the speed benchmark to figures, medians over the runs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from sglang_parse.client.figures import limit_of, per_token
from sglang_parse.client.records import PLAIN, Answer, BenchRun, has_parse


@dataclass(frozen=True, slots=True)
class SpeedAt:
    """A server at one concurrency.

    Attributes:
        server: its kind, KIND@VALUE with simulated acceptance.
        concurrency: requests at a time.
        tokens_per_s: output tokens per second.
        over: server without PARSE -> speedup over it, of those measured so far.
        limit: of this speedup over the plain target, by the server's own stage times and accepted
            tokens (``client.figures``); null without PARSE, or before the plain target.
        per_request: counter of ``meta_info`` -> mean of the requests: SGLang's accept length, and
            all numbers of ``meta_info["parse"]``.
    """

    server: str
    concurrency: int
    tokens_per_s: float
    over: dict[str, float]
    limit: float | None
    per_request: dict[str, float]


def speeds(runs: Sequence[BenchRun]) -> list[SpeedAt]:
    """A row per concurrency and server, in the order in which they were measured."""
    found: dict[tuple[int, str], list[BenchRun]] = {}
    for run in runs:
        found.setdefault((run.concurrency, run.variant.server), []).append(run)
    rates = {key: median(run.tokens_per_s for run in some) for key, some in found.items()}
    rows = []
    for concurrency, server in sorted(found, key=lambda key: key[0]):
        timed, rate = found[concurrency, server], rates[concurrency, server]
        others = [name for at, name in found if at == concurrency and name != server]
        over = {n: rate / rates[concurrency, n] for n in others if not has_parse(n)}
        plain = rates.get((concurrency, PLAIN)) if has_parse(server) else None
        limit = _limit(timed, plain) if plain else None
        answers = [answer for run in timed for answer in run.answers]
        rows.append(SpeedAt(server, concurrency, rate, over, limit, _means(answers)))
    return rows


def _limit(runs: Sequence[BenchRun], plain: float) -> float:
    r, v = (per_token(runs, key) * plain / 1e3 for key in ("draft_ms", "verify_ms"))
    return limit_of(r, v, per_token(runs, "accepted_tokens") + per_token(runs, "matched_tokens"))


def _means(answers: Sequence[Answer]) -> dict[str, float]:
    """Of the numbers that all answers have."""
    name, counts = "spec_accept_length", [dict(answer.parse) for answer in answers]
    for count, answer in zip(counts, answers, strict=True):
        count |= {name: answer.meta[name]} if name in answer.meta else {}
    is_number = {n: all(isinstance(c.get(n), int | float) for c in counts) for n in counts[0]}
    return {n: fmean(count[n] for count in counts) for n in counts[0] if is_number[n]}
