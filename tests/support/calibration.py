"""A made-up calibration for tests: numbers of the right size, nothing measured."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_parse.calibrate import figures
from sglang_parse.calibrate.figures import errors_allowed, make_grid
from sglang_parse.core.certificate import TOKEN, Certificate, Fingerprint, spread_out
from sglang_parse.core.config import ParseConfig
from sglang_parse.core.question import Question, QuestionWording, render_question
from sglang_parse.startup.certificates import fingerprint_of
from sglang_parse.tasks.collect import GradedDraft
from support.comparison import FACTS as COMPARED
from support.demo_pair import DEMO
from support.models import load_tokenizer

ALPHA, DELTA, REQUESTS, SERVED = 0.05, 0.05, 400, 0.5
FINGERPRINT = Fingerprint(
    target="0123456789abcdef",
    draft="fedcba9876543210",
    question={"partial": list(range(40)), "complete": list(range(50)), "verdicts": [8, 9]},
    judge="question",
    segment="line",
    draft_tokens=128,
    max_prefixes=16,
    selection="first-reject",
    dtype="torch.float32",
)
CERTIFICATE = Certificate(
    threshold=0.9,
    alpha=0.01,
    delta=0.05,
    loss="token",
    requests=2000,
    errors=9,
    data_set="problems",
    sampling="greedy",
    fingerprint=FINGERPRINT,
    first_verdicts=[0.1, 0.9],
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


def write_certificate(folder: Path, **changes: object) -> Path:
    """What calibrate would have written: ``CERTIFICATE`` with changes, and more keys."""
    content = {**CERTIFICATE.model_dump(), "guarantee": "in words", "results": {}, **changes}
    folder.mkdir(exist_ok=True)
    path = folder / "calibration.json"
    path.write_text(json.dumps(content))
    return path


# -- the demo pair's server ---------------------------------------------------------------


def demo_question() -> Question:
    wording = QuestionWording.read(DEMO / "question.json")
    return render_question(load_tokenizer(DEMO / "target"), wording)


def demo_args(draft: Path = DEMO / "draft") -> SimpleNamespace:
    """The server arguments that a fingerprint depends on."""
    return SimpleNamespace(
        model_path=str(DEMO / "target"),
        speculative_draft_model_path=str(draft),
        **dict.fromkeys(("revision", "speculative_draft_model_revision", "download_dir")),
    )


def demo_fingerprint(**settings: Any) -> Fingerprint:
    """The fingerprint of the demo pair's server with these settings."""
    config = ParseConfig(judge="question", **settings)
    return fingerprint_of(demo_args(), config, demo_question(), "torch.float32")


# -- figures ------------------------------------------------------------------------------


def drafts(count: int) -> list[GradedDraft]:
    """Two in five have an error; verdicts before it are high, after it mostly low."""
    numbers, made = random.Random(4), []
    for problem in range(count):
        wrong = numbers.randrange(8) if numbers.random() < 0.4 else None
        right = [numbers.uniform(0.998, 0.9995) for _ in range(8 if wrong is None else wrong)]
        bad = [numbers.betavariate(0.3, 4) for _ in range(8 - len(right))]
        made.append(
            GradedDraft(
                problem=problem,
                verdicts=(*right, *bad),
                prefix_ends=tuple(range(12, 97, 12)),
                num_drafted=96,
                finished=True,
                first_wrong=wrong,
                is_answer_right=wrong is None or numbers.random() < 0.4,
            )
        )
    return made


def scores(accuracy: float) -> list[int]:
    numbers = random.Random(9)
    return [int(numbers.random() < accuracy) for _ in range(200)]


def calibration(
    found: Sequence[GradedDraft] | None = None, served: float = SERVED
) -> tuple[figures.Calibration, Certificate]:
    """The figures and the certificate of these drafts, or of ``drafts``."""
    found = found or drafts(REQUESTS)
    grid = make_grid((v for draft in found for v in draft.verdicts), 30, [served])
    tested = figures.make_thresholds(found, FINGERPRINT.selection, grid, TOKEN, (ALPHA, DELTA))
    certified = figures.loosest_certified(tested)
    compared = figures.compare_served(served, scores(0.99), scores(0.987), DELTA)
    made = figures.Calibration(
        served_threshold=served,
        errors_allowed=errors_allowed(len(found), ALPHA, DELTA),
        separation=figures.separation(found, TOKEN),
        thresholds=tested,
        served=(compared,),
    )
    certificate = CERTIFICATE.model_copy(
        update={
            "threshold": certified and certified.threshold,
            "alpha": ALPHA,
            "requests": len(found),
            "errors": certified and certified.error_rate.count,
            "first_verdicts": spread_out([min(draft.verdicts) for draft in found]),
        }
    )
    return made, certificate
