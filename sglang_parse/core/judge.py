"""Verdict heads: verdicts from the rows of a causal verify pass, without a question.

Row 0 of a request's part of the pass is the anchor, row t is draft token t. A head scores every
draft token by the target's hidden states h at its row and at the row before, which predicted it, by
its log-probability and by the entropy of that prediction:

    score_t = weights[0] . h_(t-1) + weights[1] . h_t + scalars . (logprob_t, entropy_t) + bias

The verdict on a prefix is the sigmoid of its pooled score:

    worst-token     the smallest score so far: nothing makes good for a wrong token
    running-mean    the mean so far, + weights[2] . h at the prefix's last row

The reader ``likelihood`` is a head without hidden states, which needs no training. At threshold 0.5
it accepts tokens with p >= 0.3 exp(-entropy), the typical acceptance of Medusa (arXiv 2401.10774,
section 3.3.1). A greedy choice of the target has log-probability >= -entropy, hence a score >=
log(1 / 0.3) and a verdict >= 0.77: it is never rejected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, field_validator

from sglang_parse.core.certificate import Fingerprint
from sglang_parse.core.segment import SegmentRule
from sglang_parse.core.setting import Threshold, read_json_file

Pooling = Literal["worst-token", "running-mean"]
QUESTION, LIKELIHOOD = "question", "likelihood"
"""Judges that need no folder."""
LIKELIHOOD_SCALARS = (1.0, 1.0)
LIKELIHOOD_BIAS = -math.log(0.3)
LIKELIHOOD_STRICT = ("numbers", "code")
"""The likelihood's classes, unless others are set (docs/choosing.md, "What a threshold costs")."""
FILE, WEIGHTS = "judge.json", "judge.safetensors"
MAX_LAYERS = 3


class JudgeError(ValueError):
    """A folder without a usable verdict head."""


class JudgeFile(BaseModel):
    """The part of ``judge.json`` that a server reads.

    Attributes:
        version: of the format.
        pooling: how scores of tokens become one of a prefix.
        layers: decoder layers whose outputs are read, ascending; empty for scalars alone.
        hidden_size: width of one layer's hidden state.
        fingerprint: the server's whose drafts trained the head.
        threshold: of verdicts, at which 0.25 % of the drafts have an error accepted; the server's,
            unless ``--parse-threshold`` is set; null: 0.5.
        segment: the server's, unless ``--parse-segment`` is set; null: as in ``fingerprint``, for
            poolings that were not measured at every token.
        first_verdicts: smallest verdict of each draft, out of fold, as in a certificate.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Literal[1]
    pooling: Pooling
    layers: list[int] = Field(max_length=MAX_LAYERS)
    hidden_size: int
    fingerprint: Fingerprint
    threshold: Threshold | None = None
    segment: str | None = None
    first_verdicts: list[FiniteFloat]

    @field_validator("segment")
    @classmethod
    def _check_segment(cls, text: str | None) -> str | None:
        if text is not None:
            SegmentRule.parse(text)
        return text

    @property
    def segment_rule(self) -> SegmentRule:
        """Where the drafts that it judges are verified."""
        return SegmentRule.parse(self.segment or self.fingerprint.segment)

    @property
    def num_weights(self) -> int:
        """Rows of ``weights``; each has len(layers) * hidden_size entries."""
        return 3 if self.pooling == "running-mean" else 2


@lru_cache
def read_judge(folder: str) -> JudgeFile:
    """Reads the verdict head in a folder.

    Raises:
        JudgeError: there is none, or it is damaged.
    """
    path = Path(folder) / FILE
    return read_json_file(JudgeFile, path, str(path), JudgeError)


def pooled_scores(
    pooling: Pooling, scores: Sequence[float], end_scores: Sequence[float], ends: Sequence[int]
) -> list[float]:
    """Pools scores of tokens into one per prefix.

    Args:
        scores: [n] of the draft tokens.
        end_scores: [n] weights[2] . h of every draft token's row, for ``running-mean``.
        ends: [K] ascending offsets, 1..n.
    """
    if pooling == "worst-token":
        worst = list(accumulate(scores, min))
        return [worst[end - 1] for end in ends]
    sums = list(accumulate(scores, initial=0.0))
    return [sums[end] / end + end_scores[end - 1] for end in ends]


def sigmoid(score: float) -> float:
    """Returns 1 / (1 + exp(-score)), NaN for NaN, without overflow."""
    if score >= 0:
        return 1 / (1 + math.exp(-score))
    return math.exp(score) / (1 + math.exp(score))
