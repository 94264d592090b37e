"""Statistics of runs. Notation of limits:

    t  ms per output token of the plain target, prefill included
    r  ms of drafting per output token / t
    v  ms of verification per output token / t
    a  draft tokens that are output, accepted or matched / output tokens
The limit 1 / (r + v + 1 - a) is the speedup if nothing but drafting, verification and the target's
own tokens took time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from sglang_parse.client.records import BenchError, BenchRun, ServingRun, Variant


def costs_of(run: BenchRun, t: float) -> tuple[float, float, float]:
    """r, v and a of a run of PARSE, by the server's own stage times and tokens."""
    accepted = run.per_token("accepted_tokens") + run.per_token("matched_tokens")
    return run.per_token("draft_ms") / t, run.per_token("verify_ms") / t, accepted


def limit_of(r: float, v: float, a: float) -> float:
    """The limit in the notation of this module."""
    cost = r + v + 1 - a
    if not cost > 0:
        raise BenchError(f"stage times give no limit: r {r:.3f}, v {v:.3f}, a {a:.3f}")
    return 1 / cost


def speedups(
    timed: Iterable[BenchRun | ServingRun], variant: Variant, other: Variant
) -> list[float]:
    """Ratios of tokens per second at one concurrency, one per run that has both variants."""
    rates = {(item.variant, item.run): item.tokens_per_s for item in timed}
    runs = sorted({run for _, run in rates})
    return [
        rates[variant, run] / rates[other, run]
        for run in runs
        if (variant, run) in rates and (other, run) in rates
    ]


def rounded(value: Any) -> Any:
    """Plain data as JSON has it, its floats rounded to 4 places."""
    return json.loads(json.dumps(value), parse_float=lambda text: round(float(text), 4))
