"""Figures of streamed answers: what came between "all places are taken" and "the last was sent".

Before and after it the server has less to do than the load says. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import truediv
from statistics import median

import numpy as np

from sglang_parse.load.names import title_of
from sglang_parse.load.stream import Streamed

_ALL = (False, True)
"""Requests with and without PARSE."""


@dataclass(frozen=True, slots=True)
class Span:
    """The time that counts, in seconds of ``Streamed``'s clock."""

    start: float
    end: float

    @classmethod
    def of(cls, streams: Sequence[Streamed], concurrency: int) -> Span:
        """From the moment so many requests are under way to the moment the last is sent."""
        sent = sorted(stream.sent for stream in streams)
        return cls(sent[concurrency - 1], sent[-1])

    def __contains__(self, moment: float) -> bool:
        return self.start <= moment <= self.end


@dataclass(frozen=True, slots=True)
class Run:
    """One closed loop.

    Attributes:
        server: its name.
        concurrency: requests at a time.
        off_share: share of the requests that switch PARSE off.
        streams: the answers.
        stages: stage -> its share of the loop's time, beginning and end included; empty where the
            server publishes none.
    """

    server: str
    concurrency: int
    off_share: float
    streams: Sequence[Streamed]
    stages: Mapping[str, float] = field(default_factory=dict)

    @property
    def span(self) -> Span:
        return Span.of(self.streams, self.concurrency)


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """One line of the table: some requests of one server under one load, all runs together.

    Attributes:
        server: its name; NAME@SHARE where that share of every draft is kept, simulated.
        concurrency: requests at a time.
        off_share: share of the load's requests that switched PARSE off.
        requests_are: "all", or of a mixed load "drafting" or "off".
        answers: how many ended while the load was whole.
        tokens_per_s: output tokens per second of these requests together; median of the runs.
        over_first: the same over that of the first server's first load, run by run; their median.
        ttft_p50_ms, ttft_p99_ms: from a request's sending to its first tokens.
        gap_p50_ms, gap_p99_ms: a request's silence between two of its chunks.
        longest_p50_ms, longest_p99_ms: each request's longest such silence.
        e2e_p50_ms, e2e_p99_ms: from a request's sending to its last tokens.
        prefill_share, draft_share, verify_share, decode_share: what the server's stages
            took of the loop's time, all of its requests together; median of the runs. None where
            the server does not say.
    """

    server: str
    concurrency: int
    off_share: float
    requests_are: str
    answers: int
    tokens_per_s: float
    over_first: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    longest_p50_ms: float
    longest_p99_ms: float
    e2e_p50_ms: float
    e2e_p99_ms: float
    prefill_share: float | None
    draft_share: float | None
    verify_share: float | None
    decode_share: float | None

    @property
    def title(self) -> str:
        """For people."""
        kinds = {"all": "", "drafting": ": drafting", "off": ": switched off"}
        kind = ": all switched off" if self.off_share == 1 else kinds[self.requests_are]
        return f"{title_of(self.server)}{kind}"


def figures_of(runs: Sequence[Run], first: Sequence[Run]) -> list[LoadFigures]:
    """Lines of one server under one load; of a mixed load one line for either kind.

    Args:
        runs: its.
        first: of the first server as many, each beside one of ``runs``: a machine may be slower a
            minute later.
    """
    per_s = [_speed(run, _ALL) for run in first]
    if not 0 < runs[0].off_share < 1:
        return [_line(runs, "all", _ALL, per_s)]
    return [
        _line(runs, "drafting", (False,), per_s),
        _line(runs, "off", (True,), per_s),
    ]


def _line(
    runs: Sequence[Run], requests_are: str, kinds: tuple[bool, ...], first_per_s: Sequence[float]
) -> LoadFigures:
    first_ms: list[float] = []
    gaps_ms: list[float] = []
    longest_ms: list[float] = []
    whole_ms: list[float] = []
    speeds = [_speed(run, kinds) for run in runs]
    for run in runs:
        span = run.span
        for stream in run.streams:
            if stream.is_off not in kinds:
                continue
            if stream.sent in span:
                first_ms.append(1e3 * (stream.arrivals[0] - stream.sent))
            gaps_ms += (1e3 * (b - a) for a, b in pairwise(stream.arrivals) if b in span)
            if stream.arrivals[-1] in span:
                whole_ms.append(1e3 * (stream.arrivals[-1] - stream.sent))
                longest_ms.append(_longest_ms(stream))
    return LoadFigures(
        server=runs[0].server,
        concurrency=runs[0].concurrency,
        off_share=runs[0].off_share,
        requests_are=requests_are,
        answers=len(whole_ms),
        tokens_per_s=round(median(speeds), 1),
        over_first=round(median(map(truediv, speeds, first_per_s)), 3),
        **{
            f"{name}_p{share}_ms": _percentile(values, share)
            for name, values in (
                ("ttft", first_ms),
                ("gap", gaps_ms),
                ("longest", longest_ms),
                ("e2e", whole_ms),
            )
            for share in (50, 99)
        },
        prefill_share=_share(runs, "prefill"),
        draft_share=_share(runs, "draft"),
        verify_share=_share(runs, "verify"),
        decode_share=_share(runs, "decode"),
    )


def _speed(run: Run, kinds: tuple[bool, ...]) -> float:
    """Output tokens per second of these requests together."""
    span = run.span
    streams = (stream for stream in run.streams if stream.is_off in kinds)
    num_tokens = sum(_tokens_within(stream, span) for stream in streams)
    return num_tokens / (span.end - span.start)


def _share(runs: Sequence[Run], stage: str) -> float | None:
    known = [run.stages[stage] for run in runs if stage in run.stages]
    return round(median(known), 4) if known else None


def _tokens_within(stream: Streamed, span: Span) -> int:
    counts = (0, *stream.tokens)
    arrived = zip(stream.arrivals, pairwise(counts), strict=True)
    return sum(after - before for moment, (before, after) in arrived if moment in span)


def _longest_ms(stream: Streamed) -> float:
    return 1e3 * max((b - a for a, b in pairwise(stream.arrivals)), default=0.0)


def _percentile(values: Sequence[float], share: float) -> float:
    return round(float(np.percentile(values, share)), 1) if values else float("nan")
