"""Learn-then-Test: the thresholds whose error rate is below alpha, with confidence 1 - delta.

The grid of thresholds is fixed beforehand, from a pilot set. Thresholds are tested from the
strictest down, each at the full delta, up to the first that fails: fixed-sequence testing, which
needs no correction for the number of tests. The p-value is the exact binomial tail.

Source: Angelopoulos, Bates, Candes, Jordan, Lei, "Learn then Test" (2021).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from scipy import special, stats

from sglang_parse.client.records import BenchError

EDGE = 1e-6
"""Verdicts are clipped to this distance from 0 and 1, so that their logits are finite."""
LOW_QUANTILE = 0.02
"""Quantile of the pilot's verdicts at which the grid begins."""


def make_grid(
    pilot_verdicts: Iterable[float], size: int, given: Iterable[float]
) -> tuple[float, ...]:
    """Returns thresholds over the pilot's verdicts, evenly spaced in the logit, and those given.

    A pair's verdicts may all lie between 0.998 and 0.9995, where a linear grid has no point. The
    strictest comes first.
    """
    verdicts = np.clip(list(pilot_verdicts), EDGE, 1 - EDGE)
    if not len(verdicts):
        raise BenchError("the pilot requests have no verdicts; fix: give a larger --pilot")
    low, high = special.logit(np.quantile(verdicts, (LOW_QUANTILE, 1)))
    spaced = np.round(special.expit(np.linspace(low, high, size)), 6)
    return tuple(sorted({*given, *spaced.tolist()}, reverse=True))


def learn_then_test(
    errors: Sequence[int] | np.ndarray, requests: int, alpha: float, delta: float
) -> tuple[list[float], list[bool]]:
    """Tests every threshold.

    Args:
        errors: requests with an accepted error, per threshold, strictest first. The thresholds
            were fixed before the errors were counted.

    Returns:
        Per threshold, the p-value of "the error rate is above alpha", and whether it and all
        stricter ones passed.
    """
    p_values = stats.binom.cdf(errors, requests, alpha)
    return p_values.tolist(), np.logical_and.accumulate(p_values <= delta).tolist()


def fewest_requests(alpha: float, delta: float) -> int:
    """Returns the smallest calibration set that can certify a threshold, without any error."""
    return math.ceil(math.log(delta) / math.log(1 - alpha))


def errors_allowed(requests: int, alpha: float, delta: float) -> int:
    """Returns the most errors with which a threshold passes; -1 where none passes."""
    return int((stats.binom.cdf(range(requests + 1), requests, alpha) <= delta).sum()) - 1
