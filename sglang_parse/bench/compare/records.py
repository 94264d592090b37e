"""What the comparison measures: ways of answering, timed loads, answers.

A way is one line of the comparison: a server, and the threshold its requests ask for if it runs
PARSE. One server with six thresholds is six ways.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_parse.bench.demo.load import Reply
from sglang_parse.bench.demo.records import DemoError as CompareError

__all__ = ["CompareError", "Look", "Marks", "Timed", "Way"]

LATENCIES = ("ttft", "tpot", "itl", "e2e")
PERCENTILES = ("p50", "p90", "p99")


@dataclass(frozen=True, slots=True, order=True)
class Way:
    """A server by its name; ``threshold`` is None for servers without PARSE."""

    server: str
    threshold: float | None = None

    @property
    def custom_params(self) -> dict[str, Any]:
        """``custom_params`` of its requests."""
        return {} if self.threshold is None else {"parse": {"threshold": self.threshold}}


@dataclass(frozen=True, slots=True)
class Timed:
    """One run of ``bench_serving``.

    Attributes:
        run: 0, 1, ...; what has the same run sent the same problems, shortly after another.
        tokens_per_s: output tokens per second; tokens as the server counted them.
        latency_ms: (``ttft``, ``tpot``, ``itl`` or ``e2e``) -> (``p50``, ``p90`` or ``p99``) -> ms.
        accept_length: the server's own average at that moment, None without speculation.
    """

    way: Way
    run: int
    concurrency: int
    requests: int
    output_tokens: int
    seconds: float
    tokens_per_s: float
    requests_per_s: float
    latency_ms: Mapping[str, Mapping[str, float]]
    accept_length: float | None


@dataclass(frozen=True, slots=True)
class Look:
    """Answers with their ``meta_info``, one at a time: where PARSE's time goes."""

    way: Way
    run: int
    replies: tuple[Reply, ...]


@dataclass(frozen=True, slots=True)
class Marks:
    """Graded answers to the task's problems, in their order.

    Attributes:
        repeat: 0, or 1 for the baseline's second time.
        scores: 0 to 1 per problem; None each where the task could not be graded.
    """

    way: Way
    repeat: int
    scores: tuple[float | None, ...]
    replies: tuple[Reply, ...]

    @property
    def output_tokens(self) -> int:
        return sum(reply.output_tokens for reply in self.replies)


def share_accepted(replies: Sequence[Reply]) -> float:
    """Output tokens that are accepted draft tokens of PARSE, 0 to 1."""
    return sum(reply.parse["accepted_tokens"] for reply in replies) / sum(
        reply.output_tokens for reply in replies
    )
