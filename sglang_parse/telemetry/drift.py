"""Detects drift of a server's verdicts from those of its certificate, or its head's training.

Verdicts of one draft are not independent, so each request counts with one number: the smallest
verdict of its first draft, which no threshold changes. Every ``WINDOW`` requests are compared with
the certificate's by the two-sample Kolmogorov-Smirnov test, with one false alarm in 10,000 windows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from scipy import stats

logger = logging.getLogger(__name__)

WINDOW = 256
LEVEL = 1e-4


class DriftWatch:
    """Compares windows of a server's verdicts with the certificate's.

    Args:
        certified: smallest verdicts of the calibration set's first drafts, or the training set's.
        is_certified: they are the calibration set's.

    Attributes:
        distance: largest difference of the two distribution functions, 0 to 1, of the last
            window; None before the first.
    """

    def __init__(self, certified: Sequence[float], *, is_certified: bool = True) -> None:
        self._certified = list(certified)
        self._source = "certificate" if is_certified else "verdict head's training"
        self._fix = "run sglang-parse calibrate" if is_certified else "run sglang-parse train-judge"
        self._window: list[float] = []
        self.distance: float | None = None

    def add(self, verdicts: Sequence[float]) -> bool:
        """Adds the verdicts of a request's first draft; returns whether they complete a window
        that has drifted."""
        if not verdicts:
            return False
        self._window.append(min(verdicts))
        if len(self._window) < WINDOW:
            return False
        found = stats.ks_2samp(self._window, self._certified, method="asymp")
        self._window = []
        self.distance = float(found.statistic)
        if found.pvalue >= LEVEL:
            return False
        logger.warning(
            "PARSE: the verdicts of the last %d first drafts are not those of the %s "
            "(distance %.3f, p %.1g): requests or models have changed, and it may not hold. "
            "Fix: %s on requests like these.",
            WINDOW,
            self._source,
            self.distance,
            found.pvalue,
            self._fix,
        )
        return True
