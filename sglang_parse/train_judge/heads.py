"""Heads: what they learn from, and their weights. Pure: arrays in, weights out.

All candidates are logistic regressions on standardized features, in fp32. What they learn from:

    worst-token     tokens: those before a draft's first wrong one are right, that one is wrong
    running-mean    labeled prefixes, by the mean over all their tokens and the state at their end

A token's features are the hidden states at the row before it and at its own row, its
log-probability and the entropy of its prediction: ``core.judge`` has the formulas, and scores
drafts here as it does in a server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from sglang_parse.core.judge import Pooling, pooled_scores
from sglang_parse.train_judge.drafts import FOLDS, LabeledDraft, TrainingSet


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a head could be: layers that it reads, scikit-learn's C (inverse regularization)."""

    pooling: Pooling
    layers: tuple[int, ...]
    strength: float = 0.01

    @property
    def needs_no_segments(self) -> bool:
        """Whether it scores each token by itself, and so serves with a prefix per token."""
        return self.pooling == "worst-token"

    def served(self, drafts: Sequence[LabeledDraft]) -> Sequence[LabeledDraft]:
        """The same drafts, verified where it serves."""
        return [draft.by_token for draft in drafts] if self.needs_no_segments else drafts


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """A head as ``core.judge`` describes it: weights fp32 [2 or 3, width], scalars fp32 [2]; it
    reads [width] columns of a row."""

    pooling: Pooling
    weights: np.ndarray
    scalars: np.ndarray
    bias: float
    columns: np.ndarray

    def prefix_scores(self, draft: LabeledDraft, hidden: np.ndarray) -> list[float]:
        """[K] scores, from the rows of a draft as ``load`` returns them."""
        dots = hidden[:, self.columns] @ self.weights.T
        tokens = dots[:-1, 0] + dots[1:, 1] + draft.scalars @ self.scalars + self.bias
        at_ends = dots[1:, 2] if len(self.weights) > 2 else np.zeros_like(tokens)
        return pooled_scores(self.pooling, tokens.tolist(), at_ends.tolist(), draft.prefix_ends)

    def rescaled(self, slope: float, offset: float) -> HeadWeights:
        """The head whose scores are slope * score + offset."""
        return replace(
            self,
            weights=(slope * self.weights).astype(np.float32),
            scalars=(slope * self.scalars).astype(np.float32),
            bias=slope * self.bias + offset,
        )


class Features:
    """Standardized features of a pooling's units, [units, parts * width + 2], and their labels."""

    def __init__(self, data: TrainingSet, pooling: Pooling, max_rows: int) -> None:
        self._data = data
        self._parts = 3 if pooling == "running-mean" else 2
        numbers = np.random.default_rng(0)
        by_token = pooling == "worst-token"
        chosen = [
            _labeled_tokens(draft, max_rows, numbers) if by_token else draft.labeled
            for draft in data.drafts
        ]
        sizes = [len(units) for units in chosen]
        self._drafts = np.repeat(np.arange(len(sizes)), sizes)
        self._values = np.empty((sum(sizes), self._parts * data.width + 2), np.float32)
        for place, (start, end) in enumerate(pairwise(np.cumsum([0, *sizes]))):
            draft, units = data.drafts[place], chosen[place]
            if units:
                self._values[start:end] = _features(draft, draft.load(), pooling, units)
        self.labels = np.array(
            [
                unit != draft.wrong_token if by_token else draft.right[unit]
                for draft, units in zip(data.drafts, chosen, strict=True)
                for unit in units
            ],
            bool,
        )
        self._scaler = StandardScaler(copy=False)
        self._values = self._scaler.fit_transform(self._values)

    def fit_folds(self, candidate: Candidate, size: float = 1.0) -> list[HeadWeights]:
        """One head per fold, on that fraction of the others' prompts; empty if one of them has a
        single class."""
        folds, uses = self._data.folds[self._drafts], self._uses(size)[self._drafts]
        rows = [(folds != fold) & uses for fold in range(FOLDS)]
        if any(len({*self.labels[chosen]}) < 2 for chosen in rows):
            return []
        return [self.fit(candidate, chosen) for chosen in rows]

    def fit(self, candidate: Candidate, rows: np.ndarray) -> HeadWeights:
        """Trains on some rows; standardization is folded into the weights."""
        data, width = self._data, self._data.width
        columns = data.columns(candidate.layers)
        places = [part * width + columns for part in range(self._parts)]
        used = np.concatenate([*places, self._parts * width + np.arange(2)])
        model = LogisticRegression(C=candidate.strength, max_iter=300)
        model.fit(self._values[np.ix_(rows, used)], self.labels[rows])
        coefficients = np.zeros(self._values.shape[1])
        coefficients[used] = model.coef_[0] / self._scaler.scale_[used]
        bias = float(model.intercept_[0]) - float(coefficients @ self._scaler.mean_)
        weights = coefficients[:-2].reshape(self._parts, width)[:, columns]
        scalars = coefficients[-2:].astype(np.float32)
        return HeadWeights(candidate.pooling, weights.astype(np.float32), scalars, bias, columns)

    def mean_drafts(self, size: float) -> int:
        """Drafts that train a fold's head, on average."""
        return round(self._uses(size).sum() * (FOLDS - 1) / FOLDS)

    def _uses(self, size: float) -> np.ndarray:
        """bool [drafts] drafts of this fraction of the prompts, nested by fraction."""
        prompts = np.array([draft.prompt for draft in self._data.drafts])
        names = np.random.default_rng(1).permutation(np.unique(prompts))
        return np.isin(prompts, names[: round(size * len(names))])


def _labeled_tokens(draft: LabeledDraft, max_rows: int, numbers: np.random.Generator) -> list[int]:
    """At most ``max_rows`` tokens, 1..n: the first wrong one, prefix ends, others by chance."""
    wrong = draft.wrong_token
    num_right = draft.num_tokens if wrong is None else max(0, wrong - 1)
    kept = [wrong] if wrong else []
    ends = [end for end in draft.prefix_ends if end <= num_right]
    others = sorted({*range(1, num_right + 1)} - {*ends})
    room = max(0, max_rows - len(kept))
    if len(ends) > room:
        ends = numbers.choice(ends, room, replace=False).tolist()
    more = numbers.choice(others, min(len(others), room - len(ends)), replace=False).tolist()
    return sorted([*kept, *ends, *more])


def _features(
    draft: LabeledDraft, hidden: np.ndarray, pooling: Pooling, units: Sequence[int]
) -> np.ndarray:
    """fp32 [len(units), parts * width + 2] of tokens, or of prefixes."""
    tokens = np.concatenate([hidden[:-1], hidden[1:], draft.scalars], axis=1)
    if pooling == "worst-token":
        return tokens[np.asarray(units) - 1]
    width = hidden.shape[1]
    ends = np.asarray(draft.prefix_ends)[list(units)]
    means = np.stack([tokens[:end].mean(axis=0) for end in ends])
    return np.concatenate([means[:, : 2 * width], hidden[ends], means[:, 2 * width :]], axis=1)
