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
CHANCE, WEAK = 0.5, 0.7
"""Areas under the ROC curve: of verdicts that know nothing, and that hardly help."""
NORMAL_975 = float(stats.norm.ppf(0.975))


@dataclass(frozen=True, slots=True)
class Proportion:
    """``count`` of ``total`` with its exact two-sided 95 % interval; of none: 0, 0 and 1.

    Attributes:
        ratio, low, high: 0 to 1.
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


@dataclass(frozen=True, slots=True)
class Separation:
    """How well verdicts on complete drafts separate right from wrong ones.

    Newcombe, "Confidence intervals for an effect size measure based on the Mann-Whitney statistic,
    part 2" (2006), method 5: the areas whose own Hanley-McNeil error reaches the measured one.

    Attributes:
        right, wrong: numbers of drafts.
        auroc: probability that a right draft has a higher verdict than a wrong one, ties counted
            half: 1 is perfect, 0.5 is chance; null without drafts of both kinds.
        low, high: 95 % interval (Newcombe's method 5); 0 and 1 where ``auroc`` is null.
    """

    right: int
    wrong: int
    auroc: float | None
    low: float
    high: float

    @property
    def is_at_chance(self) -> bool:
        """Whether right and wrong drafts get the same verdicts, as far as anyone would care."""
        return self.auroc is not None and self.low <= CHANCE and self.high < WEAK

    @classmethod
    def of(cls, right: Sequence[float], wrong: Sequence[float]) -> Separation:
        """Compares the verdicts of right and wrong drafts."""
        n, m = len(right), len(wrong)
        if not n or not m:
            return cls(n, m, None, 0.0, 1.0)
        area = float(stats.mannwhitneyu(right, wrong).statistic) / (n * m)
        areas = np.linspace(0, 1, 10_001)
        spread = 1 + ((n + m) / 2 - 1) * ((1 - areas) / (2 - areas) + areas / (1 + areas))
        error = np.sqrt(areas * (1 - areas) * spread / (n * m))
        inside = areas[np.abs(areas - area) <= NORMAL_975 * error + 1e-4]
        return cls(n, m, area, float(inside[0]), float(inside[-1]))


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
    return int((stats.binom.cdf(range(requests + 1), requests, alpha) <= delta).sum()) - 1


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
    half = NORMAL_975 * math.sqrt((up + down - middle**2) / (total + 2))
    return (better - worse) / total, max(-1.0, middle - half), min(1.0, middle + half)
