"""A made-up comparison of six servers for tests: numbers of the right size, nothing measured."""

from __future__ import annotations

from sglang_parse.client.records import (
    LATENCIES,
    PERCENTILES,
    Answer,
    BenchRun,
    ServingRun,
    Variant,
)
from sglang_parse.compare.figures import Comparison, make_comparison

RATES = {
    Variant("plain"): 80.0,
    Variant("standalone"): 130.0,
    Variant("eagle3"): 160.0,
    Variant("parse", 0.0): 300.0,
    Variant("parse", 0.5): 250.0,
    Variant("parse", 1.5): 60.0,
    Variant("parse-eagle3", 0.0): 310.0,
    Variant("parse-eagle3", 0.5): 280.0,
    Variant("parse-eagle3", 1.5): 147.0,
    Variant("draft"): 470.0,
}
SHARES = {0.0: 1.0, 0.5: 0.6, 1.5: 0.0}
OWN_THRESHOLD = 0.5
CONCURRENCIES = (1, 4, 16)
FACTS = {
    "date": "2026-11-21 12:00 UTC",
    "minutes": 17.5,
    "machine": {
        "processor": "A processor with rather a long name @ 2.50GHz",
        "cpus": 2,
        "memory_gib": 23,
        "system": "Linux x86_64",
        "accelerators": [],
    },
    "versions": {"python": "3.11.7", "sglang": "0"},
    "servers": {
        "PARSE": "python -m sglang.launch_server --model-path examples/demo_pair/target "
        "--speculative-algorithm PARSE --speculative-draft-model-path examples/demo_pair/draft"
    },
    "environment": {"OMP_NUM_THREADS": "1"},
    "bench_serving": "python -m sglang.bench_serving --backend sglang-oai-chat --base-url URL",
    "task": "held-out problems of the demo pair",
    "sampling": "greedy (temperature 0)",
    "runs": 3,
    "concurrencies": list(CONCURRENCIES),
    "requests_per_run": {"1": 12, "4": 16, "16": 64},
    "problems": 40,
    "sweep_problems": 40,
    "own_threshold": OWN_THRESHOLD,
    "thresholds": [0.0, 1.5],
    "seed": 1,
    "notes": ["SGLang's STANDALONE shifts the prompt by one token."],
    "order": "the servers take turns",
}


def timed(way: Variant, run: int, concurrency: int, tokens_per_s: float) -> ServingRun:
    latency = {
        kind: {p: 1e3 * (k + 1) / tokens_per_s for k, p in enumerate(PERCENTILES)}
        for kind in LATENCIES
    }
    return ServingRun(
        way, run, concurrency, 12, 960, 960 / tokens_per_s, tokens_per_s, 1.0, latency, None
    )


def answer(
    problem: int, share: float | None, output_tokens: int = 80, score: float | None = None
) -> Answer:
    """``share``: accepted draft tokens / output tokens; None without PARSE."""
    meta: dict = {"spec_verify_ct": 20}
    if share is not None:
        stages = {"prefill_ms": 20.0, "draft_ms": 150.0, "verify_ms": 50.0}
        accepted = round(share * output_tokens)
        counters = {"mode": "parse", "rounds": 2, "accepted_tokens": accepted}
        meta["parse"] = [stages | counters | {"decode_ms": 500.0 * (1 - share)}]
    return Answer(problem, ("Answer: 1",), output_tokens, 1000.0, meta, score)


def six_servers(runs: int = 3, *, has_goals: bool = True) -> Comparison:
    """All ways at one request, their own at three concurrencies; run k is k % faster."""
    ways = tuple(RATES)
    loads = [
        timed(way, run, concurrency, rate * (1 + 0.01 * run) * concurrency**0.5)
        for way, rate in RATES.items()
        for run in range(runs)
        for concurrency in (CONCURRENCIES if way.threshold in (None, OWN_THRESHOLD) else (1,))
    ]
    looks = [
        BenchRun(way, run, 1, 1.0, tuple(answer(k, SHARES[way.threshold]) for k in range(3)))
        for way in ways
        for run in range(runs)
        if way.threshold is not None
    ]
    graded = [*map(marks, ways), marks(Variant("plain"), 1)]
    return make_comparison(ways, loads, looks, graded, OWN_THRESHOLD, has_goals=has_goals)


def marks(way: Variant, run: int = 0) -> BenchRun:
    """40 problems; the draft alone is wrong on every fourth, PARSE on one."""
    wrong = {"draft": range(0, 40, 4), "parse": range(1)}.get(way.server, range(0))
    share = None if way.threshold is None else SHARES[way.threshold]
    answers = (answer(k, share, score=float(k not in wrong)) for k in range(40))
    return BenchRun(way, run, 16, 1.0, tuple(answers))
