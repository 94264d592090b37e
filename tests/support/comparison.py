"""A made-up comparison of six servers for tests: numbers of the right size, nothing measured."""

from __future__ import annotations

from sglang_parse.client.records import (
    LATENCIES,
    PERCENTILES,
    STAGES,
    Answer,
    BenchRun,
    ServingRun,
    Variant,
)
from sglang_parse.compare.figures import Comparison, Measured, make_comparison

RATES = {
    Variant("plain"): 80.0,
    Variant("standalone"): 130.0,
    Variant("eagle3"): 160.0,
    Variant("parse", 0.0): 300.0,
    Variant("parse"): 250.0,
    Variant("parse", 1.5): 60.0,
    Variant("parse-eagle3", 0.0): 310.0,
    Variant("parse-eagle3"): 280.0,
    Variant("parse-eagle3", 1.5): 147.0,
    Variant("draft"): 470.0,
}
SERVERS = tuple(dict.fromkeys(variant.server for variant in RATES))
ACCEPTED = {0.0: 1.0, None: 0.6, 1.5: 0.0}
"""Threshold -> fraction of the output."""
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
    "settings": {"runs": 3, "problems": 40, "sweep_problems": 40},
    "requests_per_run": {"1": 12, "4": 16, "16": 64},
    "baseline": "plain",
    "stock": ["plain", "standalone", "eagle3"],
    "notes": ["SGLang's STANDALONE shifts the prompt by one token."],
}


def has_parse(variant: Variant) -> bool:
    return variant.server.startswith("parse")


def timed(variant: Variant, run: int, concurrency: int, tokens_per_s: float) -> ServingRun:
    latency = {
        kind: {p: 1e3 * (k + 1) / tokens_per_s for k, p in enumerate(PERCENTILES)}
        for kind in LATENCIES
    }
    seconds = 960 / tokens_per_s
    stages = dict.fromkeys(STAGES, 0.2) if has_parse(variant) else {}
    passes = (210.0, 31.5) if stages else ()
    one = (variant, run, concurrency, 12, 960, seconds, tokens_per_s, latency, None, stages)
    return ServingRun(*one, *passes)


def answer(
    problem: int, accepted: float | None, output_tokens: int = 80, score: float | None = None
) -> Answer:
    """``accepted``: accepted draft tokens / output tokens; None without PARSE."""
    meta: dict = {"spec_verify_ct": 20}
    if accepted is not None:
        stages = {"prefill_ms": 20.0, "draft_ms": 150.0, "verify_ms": 50.0}
        counters = {
            "mode": "parse",
            "rounds": 2,
            "accepted_tokens": round(accepted * output_tokens),
        }
        counters |= {"matched_tokens": 0, "decode_ms": 500.0 * (1 - accepted)}
        meta["parse"] = [stages | counters]
    return Answer(problem, "Answer: 1", output_tokens, 1000.0, meta, score)


def traced(variant: Variant, run: int = 0, count: int = 3) -> BenchRun:
    answers = (answer(k, ACCEPTED[variant.threshold]) for k in range(count))
    return BenchRun(variant, run, 1, 1.0, tuple(answers))


def six_measured(runs: int = 3) -> Measured:
    """All variants at one request, the servers as they are at three; run k is k % faster."""
    return Measured(
        serving=[
            timed(variant, run, concurrency, rate * (1 + 0.01 * run) * concurrency**0.5)
            for variant, rate in RATES.items()
            for run in range(runs)
            for concurrency in (CONCURRENCIES if variant.threshold is None else (1,))
        ],
        traced=[traced(v, run) for v in RATES for run in range(runs) if has_parse(v)],
        graded=[*map(graded, RATES), graded(Variant("plain"), 1)],
    )


def six_servers() -> Comparison:
    return make_comparison(six_measured(), SERVERS, "plain")


def graded(variant: Variant, run: int = 0) -> BenchRun:
    """40 problems; the draft alone is wrong on every fourth, PARSE on one."""
    wrong = {"draft": range(0, 40, 4), "parse": range(1)}.get(variant.server, range(0))
    accepted = ACCEPTED[variant.threshold] if has_parse(variant) else None
    answers = (answer(k, accepted, score=float(k not in wrong)) for k in range(40))
    return BenchRun(variant, run, 16, 1.0, tuple(answers))
