"""A made-up calibration for tests: numbers of the right size, nothing measured."""

from __future__ import annotations

import random
from typing import Any

from sglang_parse.calibrate.certify import errors_allowed, make_grid
from sglang_parse.calibrate.figures import (
    Calibration,
    Share,
    costs_of,
    make_rules,
    reliability,
    whole_wrong_answers,
)
from sglang_parse.calibrate.losses import TOKEN, FirstDraft
from sglang_parse.calibrate.report import certificate_of
from sglang_parse.calibrate.served import Mark, compared
from sglang_parse.core.certificate import Certificate, Fingerprint
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
FACTS: dict[str, Any] = {
    **{name: COMPARED[name] for name in ("date", "minutes", "machine")},
    "versions": {"python": "3.11.7", "mapie": "1", "scipy": "1"},
    "server": "python -m sglang.launch_server --model-path examples/demo_pair/target "
    "--speculative-algorithm PARSE --speculative-draft-model-path examples/demo_pair/draft",
    "max_tokens": 256,
    "pilot": 50,
    "served": 200,
    "concurrency": 16,
}


def drafts(count: int) -> list[FirstDraft]:
    """Two in five have an error; verdicts up to it are high, behind it mostly low."""
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
                mass=0.99,
                draft_ms=450.0,
                verify_ms=90.0,
            )
        )
    return made


def marks(way: str, share_right: float, tokens_per_s: float) -> list[Mark]:
    numbers = random.Random(9)
    return [
        Mark(n, way, float(numbers.random() < share_right), 96, 80, 96 / tokens_per_s, 900.0)
        for n in range(200)
    ]


def calibration() -> tuple[Calibration, Certificate]:
    found, pilot = drafts(REQUESTS), drafts(50)
    grid = make_grid((v for draft in pilot for v in draft.verdicts), 30)
    rules = make_rules(found, grid, TOKEN, ALPHA, DELTA, costs_of(found, 25.0))
    own = rules[0]
    assert own.certified is not None
    plain = marks("plain", 0.987, 40.0)
    figures = Calibration(
        rule=own.rule,
        loss=TOKEN,
        alpha=ALPHA,
        delta=DELTA,
        requests=REQUESTS,
        errors_allowed=errors_allowed(REQUESTS, ALPHA, DELTA),
        wrong=Share.of(sum(draft.is_wrong(TOKEN) for draft in found), REQUESTS),
        rules=rules,
        answers=whole_wrong_answers(found, own.rule, own.certified),
        served=(compared(own.rule, own.certified, marks("parse", 0.99, 130.0), plain, DELTA),),
        bins=reliability(found),
    )
    return figures, certificate_of(figures, found, FINGERPRINT, "problems (650, 0123456789abcdef)")
