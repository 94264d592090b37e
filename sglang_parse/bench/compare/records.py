"""What ``bench_serving`` brings back; answers with their ``meta_info`` are ``harness.records``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sglang_parse.bench.harness.records import Way

LATENCIES = ("ttft", "tpot", "itl", "e2e")
PERCENTILES = ("p50", "p90", "p99")


@dataclass(frozen=True, slots=True)
class ServingRun:
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
