"""Learn-then-Test: the thresholds whose error rate is below alpha, with confidence 1 - delta.

The grid of thresholds is fixed beforehand, from a pilot set. Thresholds are tested from the
strictest down, each at the full delta, up to the first that fails: fixed-sequence testing, which
needs no correction for the number of tests. The p-value is the exact binomial tail.

Source: Angelopoulos, Bates, Candes, Jordan, Lei, "Learn then Test" (2021).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special, stats

from sglang_parse.client.records import BenchError

EDGE = 1e-6
"""Verdicts are clipped to this distance from 0 and 1, so that their logits are finite."""
LOW_QUANTILE = 0.02
"""Quantile of the pilot's verdicts at which the grid begins."""
DEFAULT_THRESHOLD = 0.5
"""The server's default, always part of the grid."""


@dataclass(frozen=True, slots=True)
class Proportion:
    """A binomial proportion with its exact interval (Clopper and Pearson).

    Attributes:
        count, total: ``count`` of ``total``.
        ratio: 0 to 1; 0 where ``total`` is 0.
        low, high: two-sided 95 % interval; 0 and 1 where ``total`` is 0.
    """

    count: int
    total: int
    ratio: float
    low: float
    high: float

    @classmethod
    def of(cls, count: int, total: int) -> Proportion:
        if not total:
            return cls(0, 0, 0.0, 0.0, 1.0)
        interval = stats.binomtest(count, total).proportion_ci(0.95, method="exact")
        return cls(count, total, count / total, float(interval.low), float(interval.high))


def make_grid(pilot_verdicts: Iterable[float], size: int) -> tuple[float, ...]:
    """Returns thresholds over the pilot's verdicts, evenly spaced in the logit, strictest first.

    A pair's verdicts may all lie between 0.998 and 0.9995, where a linear grid has no point.
    """
    verdicts = np.clip(sorted(pilot_verdicts), EDGE, 1 - EDGE)
    if not len(verdicts):
        raise BenchError("the pilot requests have no verdicts; fix: give a larger --pilot")
    low = min(DEFAULT_THRESHOLD, float(np.quantile(verdicts, LOW_QUANTILE)))
    high = max(DEFAULT_THRESHOLD, float(verdicts[-1]))
    spaced = special.expit(np.linspace(special.logit(low), special.logit(high), size))
    return tuple(sorted({DEFAULT_THRESHOLD, *np.round(spaced, 6).tolist()}, reverse=True))


def learn_then_test(
    errors: Sequence[int], requests: int, alpha: float, delta: float
) -> tuple[list[float], list[bool]]:
    """Tests every threshold.

    Args:
        errors: requests with an accepted error, per threshold, strictest first. The thresholds
            were fixed before the errors were counted.
        requests: size of the calibration set.
        alpha: bound of the error rate.
        delta: probability that the bound does not hold.

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
    most = int(stats.binom.ppf(delta, requests, alpha))
    return most if stats.binom.cdf(most, requests, alpha) <= delta else most - 1


def upper_bound(count: int, total: int, delta: float) -> float:
    """Returns the exact one-sided upper bound of a proportion, with confidence 1 - delta."""
    test = stats.binomtest(count, total, alternative="less")
    return float(test.proportion_ci(1 - delta, method="exact").high)


def paired_difference(better: int, worse: int, total: int) -> tuple[float, float, float]:
    """Returns the difference of two proportions on the same problems and its 95 % interval.

    Bonett and Price, "Adjusted Wald confidence interval for a difference of binomial proportions
    based on paired data" (2012): a Wald interval with one better and one worse problem added.

    Args:
        better, worse: problems that only the first, only the second answered correctly.
        total: problems.
    """
    up, down = (better + 1) / (total + 2), (worse + 1) / (total + 2)
    middle = up - down
    half = float(stats.norm.ppf(0.975)) * math.sqrt((up + down - middle**2) / (total + 2))
    return (better - worse) / total, max(-1.0, middle - half), min(1.0, middle + half)
