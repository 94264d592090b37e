"""The certificate of a threshold, written by `sglang-parse calibrate` and read by the server.

With confidence 1 - delta over the draw of the calibration set, at most a fraction alpha of the
first drafts of exchangeable requests have an error accepted. This holds at the threshold and at
every stricter one, because the error rate can only fall as the threshold rises. Other models, other
questions and other data are not covered.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, FiniteFloat

from sglang_parse.core.setting import Threshold, read_json_file

NUM_QUANTILES = 513
"""Verdicts of the calibration set that a certificate stores, to compare a server's with."""
Loss = Literal["token", "answer"]
TOKEN: Loss = "token"
ANSWER: Loss = "answer"


class CertificateError(ValueError):
    """A file that is no certificate, or that certifies no threshold."""


class Fingerprint(BaseModel):
    """The inputs that determine drafts and verdicts; servers with equal ones give the same.

    Attributes:
        target, draft: digests of the models' configs and weights, independent of their paths; of an
            EAGLE-3 head that drafts, too, behind the draft model's.
        question: token ids of the question: "partial", "complete", "thinking" and "line_end" where
            thoughts are asked about, and "verdicts", the two tokens.
        judge: "question", "likelihood", or the digest of a verdict head; "" in token mode.
        segment, draft_tokens, max_prefixes, selection: the settings of these names.
        dtype: the target's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str
    draft: str
    question: dict[str, list[int]]
    judge: str
    segment: str
    draft_tokens: int
    max_prefixes: int
    selection: str
    dtype: str

    def differences(self, other: Fingerprint) -> dict[str, tuple[Any, Any]]:
        """Returns name -> (value here, value of ``other``) where the two differ."""
        ours, theirs = self.model_dump(), other.model_dump()
        return {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]}


class Certificate(BaseModel):
    """The part of ``calibration.json`` that a server reads.

    Attributes:
        threshold: the loosest certified threshold, 0 to 1; None where none qualified.
        alpha, delta: the error rate is at most alpha, with confidence 1 - delta.
        loss: the error that counts. "token": the first wrong token is accepted; "answer": a draft
            is accepted whole with a wrong answer.
        requests: size of the calibration set.
        errors: requests of the calibration set with an accepted error at the threshold.
        data_set: name and digest of the problems.
        sampling: requests that sample otherwise are not covered.
        fingerprint: the calibrated server's.
        first_verdicts: smallest verdict of a first draft: evenly spaced order statistics of the
            calibration set, at most ``NUM_QUANTILES``.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    threshold: Threshold | None
    alpha: float
    delta: float
    loss: Loss
    requests: int
    errors: int | None
    data_set: str
    sampling: Literal["greedy"]
    fingerprint: Fingerprint
    first_verdicts: list[FiniteFloat]


@lru_cache
def read_certificate(path: str) -> Certificate:
    """Reads a certificate to serve with.

    Raises:
        CertificateError: it cannot be read, or no threshold qualified.
    """
    name = f"certificate {path!r}"
    certificate = read_json_file(Certificate, Path(path), name, CertificateError)
    if certificate.threshold is None:
        raise CertificateError(
            f"{name} certifies nothing: no threshold bounds the error rate by "
            f"{certificate.alpha:g} with confidence {1 - certificate.delta:g}"
        )
    return certificate


def spread_out(values: Sequence[float]) -> list[float]:
    """At most ``NUM_QUANTILES`` evenly spaced order statistics, with the smallest and largest."""
    ordered, last = sorted(values), NUM_QUANTILES - 1
    if len(ordered) <= NUM_QUANTILES:
        return ordered
    return [ordered[round(k * (len(ordered) - 1) / last)] for k in range(NUM_QUANTILES)]
