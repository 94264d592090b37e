"""First drafts and graded answers to figures, and the thresholds that they certify. Pure.

A request counts once, by its first draft: the prefixes of a draft are nested, and later rounds
depend on the threshold. There are two losses, which can only fall as the threshold rises:

    token    the first wrong token of the draft is accepted
    answer   a finished draft is accepted whole and its answer is wrong

Learn-then-Test finds the thresholds whose error rate is below alpha, with confidence 1 - delta. The
grid of thresholds is fixed beforehand, from a pilot set. Thresholds are tested from the strictest
down, each at the full delta, up to the first that fails: fixed-sequence testing, which needs no
correction for the number of tests. The p-value is the exact binomial tail.

Source: Angelopoulos, Bates, Candes, Jordan, Lei, "Learn then Test" (2021).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special, stats

from sglang_parse.client.records import BenchError
from sglang_parse.client.statistics import Proportion, Separation, paired_difference, upper_bound
from sglang_parse.core.certificate import TOKEN, Loss
from sglang_parse.core.selection import select
from sglang_parse.tasks.collect import GradedDraft

EDGE = 1e-6
"""Verdicts are clipped to this distance from 0 and 1, so that their logits are finite."""
LOW_QUANTILE = 0.02
"""Quantile of the pilot's verdicts at which the grid begins."""


@dataclass(frozen=True, slots=True)
class AtThreshold:
    """A threshold on the calibration set.

    Attributes:
        threshold: smallest verdict that accepts.
        p_value: of "the error rate is above alpha".
        certified: this threshold and all stricter ones passed.
        error_rate: first drafts with an accepted error, of all.
        false_accepts: the same, of the drafts with an error.
        false_rejects: drafts without an error that are not accepted whole, of those without one.
        wrong_answers: drafts accepted whole whose answer is wrong, of all.
        accept_ratio: accepted fraction of the drafted tokens.
    """

    threshold: float
    p_value: float
    certified: bool
    error_rate: Proportion
    false_accepts: Proportion
    false_rejects: Proportion
    wrong_answers: Proportion
    accept_ratio: float


@dataclass(frozen=True, slots=True)
class ServedFigures:
    """Whole answers at a threshold compared with the plain target's, on other problems.

    Attributes:
        threshold: the requests' threshold.
        accuracy, plain_accuracy: right answers with PARSE and of the plain target.
        regressions: wrong answers, of the problems that the plain target answers right.
        regression_bound: exact one-sided upper bound, with confidence 1 - delta, of the fraction
            of all requests that regress.
        difference, difference_low, difference_high: accuracy minus the plain target's, with its
            paired 95 % interval (Bonett and Price).
    """

    threshold: float
    accuracy: Proportion
    plain_accuracy: Proportion
    regressions: Proportion
    regression_bound: float
    difference: float
    difference_low: float
    difference_high: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """The figures beside the certificate.

    Attributes:
        served_threshold: the server's.
        errors_allowed: the most errors with which a threshold passes; -1 where none passes.
        separation: of the verdicts on complete first drafts.
        thresholds: under the server's selection, strictest first.
        served: one per threshold that answered whole problems.
    """

    served_threshold: float
    errors_allowed: int
    separation: Separation
    thresholds: tuple[AtThreshold, ...]
    served: tuple[ServedFigures, ...]


def loosest_certified(rows: Sequence[AtThreshold]) -> AtThreshold | None:
    """The rows are strictest first."""
    return next((row for row in reversed(rows) if row.certified), None)


def error_len(draft: GradedDraft, loss: Loss) -> float:
    """Number of accepted tokens from which a loss occurs; infinite without an error."""
    if loss == TOKEN:
        return math.inf if draft.first_wrong is None else draft.prefix_ends[draft.first_wrong]
    return draft.prefix_ends[-1] if draft.is_answer_right is False else math.inf


def accepted_len(draft: GradedDraft, selection: str, threshold: float) -> int:
    verdicts, ends = draft.verdicts, draft.prefix_ends
    return select(verdicts, ends, threshold, selection, is_finished=draft.finished)[0]


def make_thresholds(
    drafts: Sequence[GradedDraft],
    selection: str,
    grid: Sequence[float],
    loss: Loss,
    levels: tuple[float, float],
) -> tuple[AtThreshold, ...]:
    """Tests every threshold of the grid; ``levels``: alpha and delta."""
    limits = np.array([error_len(draft, loss) for draft in drafts])
    ends = np.array([draft.prefix_ends[-1] for draft in drafts])
    bad = np.array([draft.is_answer_right is False for draft in drafts])
    is_wrong = np.isfinite(limits)
    total, num_wrong = len(drafts), int(is_wrong.sum())

    def at(threshold: float, accepted: np.ndarray, p_value: float, certified: bool) -> AtThreshold:
        errors = int((accepted >= limits).sum())
        rejected = int(((accepted < ends) & ~is_wrong).sum())
        return AtThreshold(
            threshold=threshold,
            p_value=p_value,
            certified=certified,
            error_rate=Proportion.of(errors, total),
            false_accepts=Proportion.of(errors, num_wrong),
            false_rejects=Proportion.of(rejected, total - num_wrong),
            wrong_answers=Proportion.of(int(((accepted == ends) & bad).sum()), total),
            accept_ratio=float(accepted.sum() / sum(draft.num_drafted for draft in drafts)),
        )

    # [thresholds, drafts]
    accepted = np.array([[accepted_len(draft, selection, t) for draft in drafts] for t in grid])
    tests = learn_then_test((accepted >= limits).sum(axis=1), total, *levels)
    return tuple(map(at, grid, accepted, *tests))


def separation(drafts: Sequence[GradedDraft], loss: Loss) -> Separation:
    """Compares the verdicts on complete drafts; those that the loss cannot grade do not count."""
    groups: tuple[list[float], list[float]] = [], []
    for draft in drafts:
        if loss == TOKEN or draft.is_answer_right is not None:
            groups[error_len(draft, loss) < math.inf].append(draft.verdicts[-1])
    return Separation.of(*groups)


def compare_served(
    threshold: float, scores: Sequence[int], plain: Sequence[int], delta: float
) -> ServedFigures:
    """Compares grades, 0 or 1, with the plain target's of the same problems, in the same order."""
    pairs, total = list(zip(scores, plain, strict=True)), len(plain)
    better, worse = pairs.count((1, 0)), pairs.count((0, 1))
    difference, low, high = paired_difference(better, worse, total)
    return ServedFigures(
        threshold=threshold,
        accuracy=Proportion.of(sum(scores), total),
        plain_accuracy=Proportion.of(sum(plain), total),
        regressions=Proportion.of(worse, sum(plain)),
        regression_bound=upper_bound(worse, total, delta),
        difference=difference,
        difference_low=low,
        difference_high=high,
    )


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
    """Returns, per threshold, the p-value of "the error rate is above alpha", and whether it and
    all stricter ones passed. ``errors``: requests with an accepted error, per threshold, strictest
    first; the thresholds were fixed before the errors were counted."""
    p_values = stats.binom.cdf(errors, requests, alpha)
    return p_values.tolist(), np.logical_and.accumulate(p_values <= delta).tolist()


def fewest_requests(alpha: float, delta: float) -> int:
    """Returns the smallest calibration set that can certify a threshold, without any error."""
    return math.ceil(math.log(delta) / math.log(1 - alpha))


def errors_allowed(requests: int, alpha: float, delta: float) -> int:
    """Returns the most errors with which a threshold passes; -1 where none passes."""
    return int((stats.binom.cdf(range(requests + 1), requests, alpha) <= delta).sum()) - 1
