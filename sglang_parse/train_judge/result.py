"""A trained head beside the readers that need no training, and the files that a server reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from sglang_parse.client.statistics import CHANCE
from sglang_parse.core.certificate import Fingerprint, spread_out
from sglang_parse.core.judge import WEIGHTS, sigmoid
from sglang_parse.core.segment import SegmentRule
from sglang_parse.train_judge.drafts import TrainingSet
from sglang_parse.train_judge.figures import (
    SERVED_RISK,
    Bootstrap,
    Estimate,
    ReaderFigures,
    threshold_at,
)
from sglang_parse.train_judge.training import Trained, likelihood_scores

QUESTION, LOGPROB = "question", "logprob"
"""Readers that need no training, by their keys in judge.json."""
COMPLETE = "complete drafts"


@dataclass(frozen=True)
class JudgeReport:
    """A trained head beside the readers that need no training, on the same drafts.

    Attributes:
        head: by verdicts out of fold.
        threshold: of verdicts where the head serves, at which ``SERVED_RISK`` percent of the
            drafts have an error accepted.
        others: by key of judge.json; the question's of the first drafts, about which it was asked.
        gains: AUROC of the head minus theirs, paired.
        curve: (drafts that trained a fold's head, AUROC).
    """

    data: TrainingSet
    trained: Trained
    head: ReaderFigures
    threshold: float
    others: dict[str, ReaderFigures]
    gains: dict[str, Estimate]
    curve: Sequence[tuple[int, Estimate]]

    @classmethod
    def of(cls, data: TrainingSet, trained: Trained) -> JudgeReport:
        drafts, compared = data.drafts, Bootstrap(data.drafts)
        likelihood = [likelihood_scores(draft) for draft in drafts]
        others = {LOGPROB: compared.figures(likelihood)}
        gains = {LOGPROB: compared.gain(trained.scores, likelihood)}
        asked = [place for place, draft in enumerate(drafts) if draft.asked]
        if asked:
            first = Bootstrap([drafts[place] for place in asked])
            answers = [drafts[place].asked for place in asked]
            others = {QUESTION: first.figures(answers), **others}
            same = [trained.scores[place] for place in asked]
            gains = {QUESTION: first.gain(same, answers), **gains}
        served = trained.candidate.served(drafts)
        return cls(
            data=data,
            trained=trained,
            head=compared.figures(trained.scores),
            threshold=sigmoid(threshold_at(served, trained.served_scores, SERVED_RISK)),
            others=others,
            gains=gains,
            curve=[(count, compared.auroc(one)) for count, one in trained.curve],
        )

    @property
    def segment(self) -> str | None:
        """Where drafts are verified when the head serves, if not as the drafts that trained it."""
        is_by_token = self.trained.candidate.needs_no_segments
        return str(SegmentRule("tokens", 1)) if is_by_token else None

    @property
    def unit(self) -> str:
        """What AUROC compares."""
        if any(len(draft.labeled) > 1 for draft in self.data.drafts):
            return "prefixes up to the first wrong one of each draft"
        return COMPLETE

    @property
    def counts(self) -> dict[str, int]:
        """Drafts, prompts, and what is right or wrong of the units."""
        drafts = self.data.drafts
        right = [draft.right[place] for draft in drafts for place in draft.labeled]
        return {
            "num_drafts": len(drafts),
            "num_prompts": len({draft.prompt for draft in drafts}),
            "num_wrong_drafts": sum(False in draft.right for draft in drafts),
            "num_right_units": right.count(True),
            "num_wrong_units": right.count(False),
        }

    @property
    def is_useless(self) -> bool:
        """Whether the head may know nothing."""
        return self.head.auroc.low is None or self.head.auroc.low <= CHANCE

    @property
    def knows_prompts_only(self) -> bool:
        """Whether the head may tell hard prompts from easy ones instead of wrong drafts from right
        ones."""
        within = self.head.auroc_within_prompt
        return within.low is not None and within.low <= CHANCE

    @property
    def unbeaten(self) -> list[str]:
        """Readers that the head may be no better than."""
        return [key for key, gain in self.gains.items() if gain.low is None or gain.low <= 0]


def content(report: JudgeReport, fingerprint: Fingerprint, facts: dict[str, Any]) -> dict[str, Any]:
    """``judge.json`` as plain data."""
    data, chosen = report.data, report.trained.candidate
    lowest = [sigmoid(min(scores)) for scores in report.trained.scores]
    return {
        "version": 1,
        "pooling": chosen.pooling,
        "layers": list(chosen.layers),
        "hidden_size": data.hidden_size,
        "fingerprint": fingerprint.model_dump(),
        "threshold": report.threshold,
        "segment": report.segment,
        "first_verdicts": spread_out(lowest),
        "unit": report.unit,
        **report.counts,
        **asdict(report.head),
        QUESTION: None,
        **{key: asdict(one) for key, one in report.others.items()},
        "auroc_gain": {key: asdict(gain) for key, gain in report.gains.items()},
        "learning_curve": [
            {"num_drafts": count, "auroc": asdict(area)} for count, area in report.curve
        ],
        "strength": chosen.strength,
        "candidates": [{**asdict(one), "rank": list(rank)} for one, rank in report.trained.tried],
        "conditions": facts,
    }


def write_weights(folder: Path, report: JudgeReport) -> None:
    head = report.trained.head
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        "weights": np.ascontiguousarray(head.weights, np.float32),
        "scalars": np.ascontiguousarray(head.scalars, np.float32),
        "bias": np.array([head.bias], np.float32),
    }
    save_file(tensors, folder / WEIGHTS)
