"""A made-up calibration for tests: numbers of the right size, nothing measured."""

from __future__ import annotations

import random
from typing import Any

from sglang_parse.calibrate import figures
from sglang_parse.calibrate.certify import Proportion, errors_allowed, make_grid
from sglang_parse.calibrate.first_draft import TOKEN, FirstDraft
from sglang_parse.core.certificate import Certificate, Fingerprint, spread_out
from support.comparison import FACTS as COMPARED

ALPHA, DELTA, REQUESTS = 0.05, 0.05, 400
FINGERPRINT = Fingerprint(
    target="0123456789abcdef",
    draft="fedcba9876543210",
    question={"partial": list(range(40)), "complete": list(range(50)), "verdicts": [8, 9]},
    segment="line",
    draft_tokens=128,
    max_prefixes=16,
    selection="first-reject",
    dtype="torch.float32",
)
CONDITIONS: dict[str, Any] = {
    **{name: COMPARED[name] for name in ("date", "minutes", "machine")},
    "versions": {"python": "3.11.7", "scipy": "1"},
    "server": "python -m sglang.launch_server --model-path examples/demo_pair/target "
    "--speculative-algorithm PARSE --speculative-draft-model-path examples/demo_pair/draft",
    "max_tokens": 256,
    "pilot": 50,
    "served": 200,
    "concurrency": 16,
}


def drafts(count: int) -> list[FirstDraft]:
    """Two in five have an error; verdicts before it are high, after it mostly low."""
    numbers, made = random.Random(4), []
    for problem in range(count):
        wrong = numbers.randrange(8) if numbers.random() < 0.4 else None
        right = [numbers.uniform(0.998, 0.9995) for _ in range(8 if wrong is None else wrong)]
        bad = [numbers.betavariate(0.3, 4) for _ in range(8 - len(right))]
        made.append(
            FirstDraft(
                problem=problem,
                verdicts=(*right, *bad),
                prefix_ends=tuple(range(12, 97, 12)),
                num_drafted=96,
                finished=True,
                first_wrong=wrong,
                is_answer_right=wrong is None or numbers.random() < 0.4,
                draft_ms=450.0,
                verify_ms=90.0,
            )
        )
    return made


def answers(
    variant: str, accuracy: float, tokens_per_s: float, decode_ms: float = 2400.0
) -> list[figures.GradedAnswer]:
    numbers = random.Random(9)
    return [
        figures.GradedAnswer(
            *(n, variant, float(numbers.random() < accuracy), 96, 80, 96 / tokens_per_s),
            decode_ms=decode_ms,
        )
        for n in range(200)
    ]


def calibration() -> tuple[figures.Calibration, Certificate]:
    found, pilot = drafts(REQUESTS), drafts(50)
    grid = make_grid((v for draft in pilot for v in draft.verdicts), 30)
    plain = answers("plain", 0.987, 40.0)
    costs = figures.relative_costs(found, plain)
    selections = figures.make_selections(found, grid, TOKEN, (ALPHA, DELTA), costs)
    certified = figures.loosest_certified(selections[FINGERPRINT.selection])
    assert certified is not None
    compared = figures.compare_served(
        certified.threshold, answers("parse", 0.99, 130.0), plain, DELTA
    )
    made = figures.Calibration(
        errors_allowed=errors_allowed(REQUESTS, ALPHA, DELTA),
        wrong_drafts=Proportion.of(sum(draft.is_wrong(TOKEN) for draft in found), REQUESTS),
        selections=selections,
        served=(compared,),
        bins=figures.reliability(found),
    )
    certificate = Certificate(
        threshold=certified.threshold,
        alpha=ALPHA,
        delta=DELTA,
        loss=TOKEN,
        requests=REQUESTS,
        errors=certified.error_rate.count,
        data_set="problems (650, 0123456789abcdef)",
        sampling="greedy",
        fingerprint=FINGERPRINT,
        first_verdicts=spread_out([min(draft.verdicts) for draft in found]),
    )
    return made, certificate
