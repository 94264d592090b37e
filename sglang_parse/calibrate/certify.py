"""Learn-then-Test: which thresholds keep the loss below alpha, with confidence 1 - delta.

Thresholds are fixed beforehand, from a pilot set, and tested from the strictest downward, each at
the full delta, up to the first that fails: fixed-sequence testing, which needs no correction.
mapie's controller does it; SciPy's exact binomial looks over its shoulder.

Sources: Angelopoulos, Bates, Candes, Jordan, Lei, "Learn then Test" (2021); mapie 1.6,
``mapie.risk_control``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from mapie.risk_control import BinaryClassificationController, BinaryRisk
from scipy import special, stats

from sglang_parse.client.records import BenchError

EDGE = 1e-6
"""Verdicts nearer to 0 or 1 than this are taken for it: a logit must be finite."""
LOW_SHARE = 0.02
"""Of the pilot's verdicts, those below the grid's lowest threshold."""
USUAL = 0.5
"""The server's default is always among the thresholds."""


@dataclass(frozen=True, slots=True)
class Tested:
    """A threshold and its test.

    Attributes:
        threshold: smallest verdict that accepts.
        errors: requests of the calibration set that lose at it.
        p_value: of "the loss is above alpha": the exact binomial tail.
        certified: it and all stricter ones passed.
    """

    threshold: float
    errors: int
    p_value: float
    certified: bool


def make_grid(pilot_verdicts: Iterable[float], size: int) -> tuple[float, ...]:
    """Thresholds, the strictest first: evenly spaced in the logit, over the pilot's verdicts.

    A pair's verdicts may all lie between 0.998 and 0.9995, where a linear grid has no point.
    """
    verdicts = np.clip(sorted(pilot_verdicts), EDGE, 1 - EDGE)
    if not len(verdicts):
        raise BenchError("the pilot requests brought no verdicts; fix: give a larger --pilot")
    low = min(USUAL, float(np.quantile(verdicts, LOW_SHARE)))
    high = max(USUAL, float(verdicts[-1]))
    spaced = special.expit(np.linspace(special.logit(low), special.logit(high), size))
    return tuple(sorted({USUAL, *(float(round(t, 6)) for t in spaced)}, reverse=True))


def learn_then_test(
    scores: Sequence[float], grid: Sequence[float], alpha: float, delta: float
) -> tuple[Tested, ...]:
    """The test of every threshold.

    Args:
        scores: per request of the calibration set, the largest threshold at which it loses; -1
            where it never does (``losses.FirstDraft.score``).
        grid: thresholds, the strictest first; fixed before the scores were seen.
        alpha, delta: the loss to stay below, and the chance to be wrong about that.

    Raises:
        BenchError: mapie certifies what the exact binomial does not.
    """
    certified, found = _controlled(scores, grid, alpha, delta)
    tests = []
    for threshold, p_mapie in zip(grid, found, strict=True):
        errors = sum(score >= threshold for score in scores)
        p_value = float(stats.binom.cdf(errors, len(scores), alpha))
        _check(threshold, p_mapie, p_value, errors, len(scores), alpha)
        tests.append(Tested(threshold, errors, p_value, threshold in certified))
    return tuple(tests)


def _controlled(
    scores: Sequence[float], grid: Sequence[float], alpha: float, delta: float
) -> tuple[set[float], list[float]]:
    """Thresholds mapie certifies, and its p-values in the grid's order."""
    # A custom risk: its own false positive rate is conditional on the requests without an error.
    risk = BinaryRisk(
        risk_occurrence=lambda has_error, keeps_it: (has_error == 1) & (keeps_it == 1),
        risk_condition=lambda has_error, _: np.ones(len(has_error), dtype=bool),
        higher_is_better=False,
    )
    values = np.asarray(scores)
    controller = BinaryClassificationController(
        predict_function=lambda rows: np.column_stack([1 - rows, rows]),
        risk=risk,
        target_level=alpha,
        confidence_level=1 - delta,
        best_predict_param_choice=risk,
        list_predict_params=np.asarray(grid),
        fwer_method="fixed_sequence",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns where nothing qualifies: a result like others
        controller.calibrate(values, (values >= 0).astype(int))
    assert controller.p_values is not None
    return {float(t) for t in controller.valid_predict_params}, list(controller.p_values[:, 0])


def _check(
    threshold: float, p_mapie: float, p_value: float, errors: int, requests: int, alpha: float
) -> None:
    """mapie rounds the number of errors up from a quotient, at times to one more: stricter by one
    error, never looser. Raises: BenchError, for anything else."""
    one_more = float(stats.binom.cdf(errors + 1, requests, alpha))
    slack = 1e-9
    if not p_value - slack <= p_mapie <= one_more + slack:
        raise BenchError(
            f"threshold {threshold:g}: mapie's p-value is {p_mapie:.6g}, the exact binomial's is "
            f"{p_value:.6g} ({errors} errors of {requests}); fix: install the pinned mapie"
        )


def certified_threshold(tests: Sequence[Tested]) -> Tested | None:
    """The loosest threshold that is certified, with all stricter ones."""
    certified = [test for test in tests if test.certified]
    return min(certified, key=lambda test: test.threshold, default=None)


def fewest_requests(alpha: float, delta: float) -> int:
    """Below this number of requests nothing can be certified, even without an error."""
    return math.ceil(math.log(delta) / math.log(1 - alpha))


def errors_allowed(requests: int, alpha: float, delta: float) -> int:
    """Most errors with which a threshold passes; -1 where none does."""
    most = int(stats.binom.ppf(delta, requests, alpha))
    return most if stats.binom.cdf(most, requests, alpha) <= delta else most - 1
