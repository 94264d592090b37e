"""What `sglang-parse calibrate` promises about a threshold, and what the promise was made for.

A promise, with confidence 1 - delta over the draws of the calibration set: of first drafts of
exchangeable requests, a share of at most alpha keeps text from the first wrong token on. It holds
at the threshold and at every stricter one, because that loss can only fall as the threshold rises.
Nothing is said of other models, other questions, other data.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

NUM_QUANTILES = 513
"""Verdicts a certificate keeps of the calibration set, to compare a server's with."""


class CertificateError(ValueError):
    """A file that is no certificate, or certifies nothing; the text says which and the fix."""


class Fingerprint(BaseModel):
    """What verdicts and drafts depend on. Two servers with the same one judge alike.

    Attributes:
        target, draft: digests of the models' shapes and weights, wherever they lie.
        question: token ids of the question: "partial", "complete", "thinking" and "line_end" where
            thoughts are asked about, and "verdicts", the two tokens.
        segment, draft_tokens, max_prefixes, selection: as the settings of these names.
        dtype: the target's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str
    draft: str
    question: dict[str, list[int]]
    segment: str
    draft_tokens: int
    max_prefixes: int
    selection: str
    dtype: str

    def differences(self, other: Fingerprint) -> dict[str, tuple[Any, Any]]:
        """Name -> (value here, value there), where the two differ."""
        ours, theirs = self.model_dump(), other.model_dump()
        return {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]}


class Certificate(BaseModel):
    """What a server reads of ``calibration.json``; the file's other keys are for people.

    Attributes:
        threshold: the loosest one that is certified, 0 to 1; None where none qualified.
        alpha, delta: at most a share alpha loses, with confidence 1 - delta.
        loss: "token": the first wrong token is kept; "answer": a wrong answer is kept whole.
        requests: size of the calibration set.
        errors: of them, how many lose at the threshold.
        data_set: what was asked.
        sampling: how; a request that samples otherwise is not covered.
        fingerprint: of the server that was asked.
        first_verdicts: the smallest verdict of a first draft: evenly spaced order statistics of the
            calibration set, at most ``NUM_QUANTILES``.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    threshold: float | None
    alpha: float
    delta: float
    loss: Literal["token", "answer"]
    requests: int
    errors: int | None
    data_set: str
    sampling: Literal["greedy"]
    fingerprint: Fingerprint
    first_verdicts: list[float]


@lru_cache
def read_certificate(path: str) -> Certificate:
    """A certificate to serve by.

    Raises:
        CertificateError: it cannot be read, or no threshold qualified.
    """
    name = f"certificate {path!r}"
    try:
        certificate = Certificate(**json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise CertificateError(f"{name} cannot be read ({error.strerror})") from error
    except (UnicodeDecodeError, json.JSONDecodeError, TypeError) as error:
        raise CertificateError(f"{name} is not a JSON object: {error}") from error
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, problem["loc"]))
        raise CertificateError(f"{name} has a wrong {place}: {problem['msg']}") from error
    if certificate.threshold is None:
        raise CertificateError(
            f"{name} certifies nothing: no threshold kept the loss below {certificate.alpha:g} "
            f"with confidence {1 - certificate.delta:g}"
        )
    return certificate


def spread_out(values: Sequence[float], count: int = NUM_QUANTILES) -> list[float]:
    """At most ``count`` evenly spaced order statistics, the smallest and the largest among them."""
    ordered = sorted(values)
    if len(ordered) <= count:
        return ordered
    return [ordered[round(k * (len(ordered) - 1) / (count - 1))] for k in range(count)]
