"""How well scores of prefixes tell right from wrong. Pure.

A unit is a prefix with a label: all up to a draft's first wrong one, or the complete draft where
errors are not located. All 95 % intervals are percentiles of a bootstrap by prompt, the same
resamples for every reader of verdicts, so that their differences are paired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from sglang_parse.train_judge.drafts import LabeledDraft

RANKED_RISK, SERVED_RISK = 2, 0.25
"""Percent of drafts with an accepted error: what ranks candidates, and what a server's default
threshold has, because an answer has several drafts."""
RISKS = (SERVED_RISK, 1, RANKED_RISK, 5)
"""Percent of drafts with an accepted error."""
TINY = 1e-9
"""Against rounding of counts that are whole numbers."""
Scores = Sequence[Sequence[float]]
"""By draft and prefix; higher is better."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its 95 % interval; all null where there is nothing to compute it from."""

    value: float | None
    low: float | None
    high: float | None

    @classmethod
    def of(cls, values: np.ndarray) -> Estimate:
        """Args: values: [1 + resamples], that of all prompts first; NaN where undefined."""
        if np.isnan(values[0]):
            return cls(None, None, None)
        low, high = np.nanpercentile(values[1:], (2.5, 97.5))
        return cls(float(values[0]), float(low), float(high))


@dataclass(frozen=True, slots=True)
class ReaderFigures:
    """How well one reader's verdicts tell right from wrong.

    Attributes:
        auroc: probability that a right unit has a higher verdict than a wrong one, ties counted
            half: 1 is perfect, 0.5 is chance.
        auroc_within_prompt: the same, of units of one prompt; null where no prompt has both.
        kept_at_risk: fraction of the draft tokens that first-reject accepts at the threshold at
            which 0.25, 1, 2 or 5 % of the drafts have an error accepted. A draft that has a label
            only as a whole counts if it is accepted whole.
    """

    auroc: Estimate
    auroc_within_prompt: Estimate
    kept_at_risk: dict[str, Estimate]


class Bootstrap:
    """Computes figures of several readers of the same drafts; without ``resamples`` of the
    bootstrap only the numbers themselves."""

    def __init__(self, drafts: Sequence[LabeledDraft], resamples: int = 400) -> None:
        names, prompts = np.unique([draft.prompt for draft in drafts], return_inverse=True)
        count = len(names)
        drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), resamples)
        self._resamples = np.vstack([np.ones(count, int), drawn])  # how often each prompt counts
        self._units = [(d, k) for d, draft in enumerate(drafts) for k in draft.labeled]
        self._unit_prompts = prompts[[d for d, _ in self._units]]
        self._right = np.array([drafts[d].right[k] for d, k in self._units], bool)
        self._drafts, self._prompts = drafts, prompts

    def figures(self, scores: Scores) -> ReaderFigures:
        kept = self._kept_at_risk(scores)
        return ReaderFigures(
            auroc=self.auroc(scores),
            auroc_within_prompt=Estimate.of(self._within_prompt(scores)),
            kept_at_risk={f"{at}": Estimate.of(kept[:, k]) for k, at in enumerate(RISKS)},
        )

    def gain(self, scores: Scores, other: Scores) -> Estimate:
        """The paired difference of two AUROCs."""
        return Estimate.of(self._aurocs(scores) - self._aurocs(other))

    def auroc(self, scores: Scores) -> Estimate:
        return Estimate.of(self._aurocs(scores))

    def rank(self, scores: Scores) -> tuple[float, float]:
        """Of a candidate: tokens kept at ``RANKED_RISK`` percent, rounded, then AUROC. Where only
        complete drafts have labels, AUROC alone: one more or less decides about tokens kept."""
        area = float(self._aurocs(scores)[0])
        if len(self._units) <= len(self._drafts):
            return 0.0, area
        kept = self._kept_at_risk(scores)[0, RISKS.index(RANKED_RISK)]
        return round(float(kept), 2), area

    def _aurocs(self, scores: Scores) -> np.ndarray:
        """[1 + resamples]"""
        places, size = _places([scores[d][k] for d, k in self._units])

        def count(times: np.ndarray, chosen: np.ndarray) -> np.ndarray:
            """By ascending score."""
            return np.bincount(places[chosen], times[self._unit_prompts[chosen]], size)

        def area(times: np.ndarray) -> float:
            right, wrong = (count(times, kind) for kind in (self._right, ~self._right))
            below = np.cumsum(wrong) - wrong
            return _ratio((right * (below + wrong / 2)).sum(), right.sum() * wrong.sum())

        return np.array([area(times) for times in self._resamples])

    def _kept_at_risk(self, scores: Scores) -> np.ndarray:
        """[1 + resamples, len(RISKS)]"""
        lowest = [list(accumulate(values, min)) for values in scores]  # first-reject
        places, size = _places([value for values in lowest for value in values])
        starts = np.cumsum([0, *map(len, lowest)])
        lengths = np.concatenate([_lengths(draft) for draft in self._drafts])
        owners = np.repeat(self._prompts, np.diff(starts))
        errors = [
            (d, one.right.index(False)) for d, one in enumerate(self._drafts) if False in one.right
        ]
        error_places = places[[starts[d] + k for d, k in errors]]
        error_owners = self._prompts[[d for d, _ in errors]]

        def kept(times: np.ndarray) -> list[float]:
            tokens = np.bincount(places, times[owners] * lengths, size)
            accepted = _from(np.bincount(error_places, times[error_owners], size))
            # At the threshold above every score nothing is accepted.
            tokens_kept = np.append(_from(tokens), 0.0)
            allowed = [percent / 100 * times[self._prompts].sum() + TINY for percent in RISKS]
            return [_ratio(tokens_kept[(accepted > most).sum()], tokens.sum()) for most in allowed]

        return np.array([kept(times) for times in self._resamples])

    def _within_prompt(self, scores: Scores) -> np.ndarray:
        """[1 + resamples]"""
        values = np.array([scores[d][k] for d, k in self._units])
        wins, pairs = np.zeros((2, self._resamples.shape[1]))
        order = np.argsort(self._unit_prompts, kind="stable")
        bounds = np.flatnonzero(np.diff(self._unit_prompts[order])) + 1
        for units in np.split(order, bounds):
            right, wrong = (values[units[self._right[units] == kind]] for kind in (True, False))
            signs = np.sign(right[:, None] - wrong[None, :])
            prompt = self._unit_prompts[units[0]]
            wins[prompt], pairs[prompt] = (signs + 1).sum() / 2, signs.size
        return np.array([_ratio(times @ wins, times @ pairs) for times in self._resamples])


def threshold_at(drafts: Sequence[LabeledDraft], scores: Scores, percent: float) -> float:
    """The lowest score at which at most so many drafts have an error accepted."""
    lowest = [list(accumulate(values, min)) for values in scores]  # first-reject
    found = zip(lowest, drafts, strict=True)
    errors = sorted(one[d.right.index(False)] for one, d in found if False in d.right)
    allowed = int(percent / 100 * len(lowest) + TINY)
    if len(errors) <= allowed:
        return min(min(one) for one in lowest)
    return float(np.nextafter(errors[-1 - allowed], np.inf))


def _lengths(draft: LabeledDraft) -> np.ndarray:
    """[K] tokens that each prefix adds. Those before the first label are of unknown worth alone."""
    lengths, first = np.diff([0, *draft.prefix_ends]), draft.labeled[0]
    lengths[first] = draft.prefix_ends[first]
    lengths[:first] = 0
    return lengths


def _places(values: Sequence[float]) -> tuple[np.ndarray, int]:
    """The place of each value among the different ones, ascending, and their number."""
    unique, places = np.unique(values, return_inverse=True)
    return places, len(unique)


def _from(counts: np.ndarray) -> np.ndarray:
    """Sums from each place on."""
    return np.cumsum(counts[::-1])[::-1]


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole > 0 else float("nan")
