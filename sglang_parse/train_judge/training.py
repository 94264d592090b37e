"""Labeled drafts to a verdict head. Pure: arrays in, weights and out-of-fold scores out.

All candidates are logistic regressions on standardized features, in fp32. What they learn from:

    worst-token     tokens: those before a draft's first wrong one are right, that one is wrong
    segment-mean    labeled prefixes, by the mean over the segment that each one ends with
    running-mean    labeled prefixes, by the mean over all their tokens and the state at their end

A token's features are the hidden states at the row before it and at its own row, its
log-probability and the entropy of its prediction: ``core.judge`` has the formulas, and scores
drafts here as it does in a server. Folds are by prompt, with errors in each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedGroupKFold
from sklearn.preprocessing import StandardScaler

from sglang_parse.core.judge import (
    LIKELIHOOD_BIAS,
    LIKELIHOOD_SCALARS,
    Pooling,
    pooled_scores,
)
from sglang_parse.train_judge.figures import Comparison, Scores

FOLDS = 5
STRENGTH, OTHER_STRENGTHS = 0.01, (0.0001, 0.001, 0.1)
"""Inverse regularization of every candidate, and what the best one is tried with, too."""
MAX_ITERATIONS = 300
TOKEN_BONUS = 0.02
"""Added to the share of tokens kept that ranks a head which needs no segments: after an error the
target decodes one token, not the rest of a line (1.25 times the speed on the demo pair, at 16)."""
CURVE = (0.125, 0.25, 0.5)
"""Fractions of the prompts of the learning curve, beside all of them."""


class NothingToLearnError(Exception):
    """The labels cannot train anything; the message says why."""


def labels_up_to(first_wrong: int | None, count: int) -> list[bool | None]:
    """Labels of ``count`` prefixes: after the first wrong one there is none."""
    if first_wrong is None:
        return [True] * count
    return [*[True] * first_wrong, False, *[None] * (count - first_wrong - 1)]


@dataclass(frozen=True, slots=True)
class LabeledDraft:
    """A draft as the target reads it, with labels.

    Attributes:
        prompt: drafts of one prompt have the same number.
        prefix_ends: [K] prefix k is the first ``prefix_ends[k]`` of n draft tokens.
        right: [K] whether the prefix is right; None where it has no label. After the first wrong
            prefix there is none.
        wrong_token: the first wrong token, 1..n, or 0 for the anchor; None without one, or where
            errors are not located.
        logprobs, entropies: [n] of the draft's tokens, under the target.
        load: returns its rows, fp32 [1 + n, len(layers) * hidden_size], the anchor's first.
        asked: [K] the question's verdicts; empty where none was asked.
    """

    prompt: int
    prefix_ends: Sequence[int]
    right: Sequence[bool | None]
    wrong_token: int | None
    logprobs: Sequence[float]
    entropies: Sequence[float]
    load: Callable[[], np.ndarray]
    asked: Sequence[float] = ()

    @property
    def num_tokens(self) -> int:
        """n, the verified draft tokens."""
        return self.prefix_ends[-1]

    @property
    def by_token(self) -> LabeledDraft:
        """The same draft, verified at every token; errors are located."""
        first_wrong = None if self.wrong_token is None else max(0, self.wrong_token - 1)
        right = labels_up_to(first_wrong, self.num_tokens)
        return replace(self, prefix_ends=range(1, self.num_tokens + 1), right=right, asked=())

    @property
    def labeled(self) -> list[int]:
        """Prefixes with a label."""
        return [place for place, right in enumerate(self.right) if right is not None]

    @property
    def scalars(self) -> np.ndarray:
        """fp32 [n, 2]"""
        return np.array([self.logprobs, self.entropies], np.float32).T


@dataclass(frozen=True)
class TrainingSet:
    """Labeled drafts, and what their rows are.

    Attributes:
        layers: ascending.
        locates_tokens: wrong drafts have a ``wrong_token``.
    """

    drafts: Sequence[LabeledDraft]
    layers: tuple[int, ...]
    hidden_size: int
    locates_tokens: bool

    @property
    def width(self) -> int:
        return len(self.layers) * self.hidden_size

    def columns(self, layers: Sequence[int]) -> np.ndarray:
        """Columns of these layers in a row."""
        starts = [self.layers.index(layer) * self.hidden_size for layer in layers]
        ranges = [np.arange(start, start + self.hidden_size) for start in starts]
        return np.concatenate([np.arange(0), *ranges])

    @cached_property
    def folds(self) -> np.ndarray:
        """[drafts] the fold that holds each draft out. Raises: NothingToLearnError."""
        prompts = np.array([draft.prompt for draft in self.drafts])
        is_wrong = np.array([False in draft.right for draft in self.drafts])
        has_right = np.array([True in draft.right for draft in self.drafts])
        counts = [len({*prompts[chosen]}) for chosen in (has_right, is_wrong)]
        if min(counts, default=0) < FOLDS:
            raise NothingToLearnError(
                f"{counts[0]} prompts have something right and {counts[1]} something wrong; "
                f"training needs {FOLDS} of each"
            )
        folds = np.zeros(len(self.drafts), int)
        splitter = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=0)
        for fold, (_, held_out) in enumerate(splitter.split(prompts, is_wrong, prompts)):
            folds[held_out] = fold
        return folds


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a head could be.

    Attributes:
        layers: whose hidden states it reads.
        uses_scalars: whether it reads log-probabilities and entropies.
        strength: scikit-learn's C.
    """

    pooling: Pooling
    layers: tuple[int, ...]
    uses_scalars: bool = True
    strength: float = STRENGTH

    @property
    def needs_no_segments(self) -> bool:
        """Whether it scores each token by itself, and so serves with a prefix per token."""
        return self.pooling == "worst-token"


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """A head as ``core.judge`` describes it.

    Attributes:
        weights: fp32 [2 or 3, width]; ``scalars``: fp32 [2].
        columns: [width] columns of a row that it reads.
    """

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


@dataclass(frozen=True, slots=True)
class Trained:
    """The outcome of a training.

    Attributes:
        candidate: the chosen one.
        head: trained on all drafts; its scores are log-odds that a prefix is right.
        scores: of heads that saw no draft of the same prompt, as log-odds.
        token_scores: the same of every token's prefix, if such a head needs no segments.
        curve: (mean number of drafts that trained, scores) at fractions of the prompts.
        tried: every candidate with its rank, best first.
    """

    candidate: Candidate
    head: HeadWeights
    scores: Scores
    token_scores: Scores | None
    curve: Sequence[tuple[int, Scores]]
    tried: Sequence[tuple[Candidate, tuple[float, float]]]


def likelihood_scores(draft: LabeledDraft) -> list[float]:
    """[K] scores of the reader that needs no training."""
    tokens = draft.scalars @ np.array(LIKELIHOOD_SCALARS) + LIKELIHOOD_BIAS
    return pooled_scores("worst-token", tokens.tolist(), (), draft.prefix_ends)


def smallest_logprobs(draft: LabeledDraft) -> list[float]:
    """[K] smallest log-probability so far."""
    return pooled_scores("worst-token", list(draft.logprobs), (), draft.prefix_ends)


def train(data: TrainingSet, max_rows: int, on_step: Callable[[], None] = lambda: None) -> Trained:
    """Chooses, calibrates and trains a head.

    Args:
        max_rows: most tokens of a draft that train a ``worst-token`` head.
        on_step: called ``num_steps`` times.

    Raises:
        NothingToLearnError: there are not enough labels of both kinds, or the best head's scores
            are no higher where a prefix is right.
    """
    trainer = _Trainer(data, max_rows, on_step)
    tried = [found for group in first_candidates(data) for found in trainer.rate(group)]
    if not tried:
        raise NothingToLearnError("no fold has both right and wrong labels")
    best = max(tried, key=lambda one: one[1])[0]
    tried += trainer.rate(refinements(best))
    tried.sort(key=lambda one: one[1], reverse=True)
    candidate = tried[0][0]
    features = trainer.features(candidate.pooling)
    heads = features.fit_folds(candidate)
    scores = trainer.score(heads)
    slope, offset = platt(data.drafts, scores)

    def as_log_odds(found: Scores) -> Scores:
        return [[slope * score + offset for score in draft] for draft in found]

    sizes = [(size, features.fit_folds(candidate, size)) for size in CURVE]
    curve = [(features.mean_drafts(size), trainer.score(some)) for size, some in sizes if some]
    curve.append((features.mean_drafts(1.0), scores))
    head = features.fit(candidate, np.ones(len(features.labels), bool))
    on_step()
    by_token = trainer.score(heads, by_token=True) if candidate.needs_no_segments else None
    return Trained(
        candidate=candidate,
        head=head.rescaled(slope, offset),
        scores=as_log_odds(scores),
        token_scores=by_token and as_log_odds(by_token),
        curve=curve,
        tried=tried,
    )


def poolings(data: TrainingSet) -> tuple[Pooling, ...]:
    """Poolings that the labels can train: without located errors only the mean over a draft."""
    if data.locates_tokens:
        return ("worst-token", "segment-mean", "running-mean")
    has_parts = any(len(draft.labeled) > 1 for draft in data.drafts)
    return ("segment-mean", "running-mean") if has_parts else ("running-mean",)


def first_candidates(data: TrainingSet) -> list[list[Candidate]]:
    """Each layer, all of them, and none, by pooling."""
    subsets = dict.fromkeys([(), *((layer,) for layer in data.layers), data.layers])
    return [[Candidate(pooling, layers) for layers in subsets] for pooling in poolings(data)]


def refinements(best: Candidate) -> list[Candidate]:
    """The best candidate without scalars, and with other strengths."""
    others = [replace(best, strength=strength) for strength in OTHER_STRENGTHS]
    return [*others, *([replace(best, uses_scalars=False)] if best.layers else [])]


def num_steps(data: TrainingSet) -> int:
    """Calls of ``on_step``, at most."""
    return sum(map(len, first_candidates(data))) + len(OTHER_STRENGTHS) + 2


def platt(drafts: Sequence[LabeledDraft], scores: Scores) -> tuple[float, float]:
    """Returns slope and offset that turn scores into log-odds of a right prefix.

    Raises:
        NothingToLearnError: higher scores are not better.
    """
    pairs = [
        (values[place], draft.right[place])
        for draft, values in zip(drafts, scores, strict=True)
        for place in draft.labeled
    ]
    values, right = np.array(pairs, float).T
    spread = float(values.std()) or 1.0
    fitted = LogisticRegression(C=1e6).fit(values[:, None] / spread, right)
    slope = float(fitted.coef_[0, 0]) / spread
    if slope <= 0:
        raise NothingToLearnError(
            "held-out drafts that are right get no higher scores than wrong ones: the hidden "
            "states of these layers know nothing about these labels, or there are too few"
        )
    return slope, float(fitted.intercept_[0])


class _Trainer:
    """Rates candidates; keeps the features of one pooling."""

    def __init__(self, data: TrainingSet, max_rows: int, on_step: Callable[[], None]) -> None:
        self._data, self._max_rows, self._on_step = data, max_rows, on_step
        self._features: _Features | None = None
        data.folds  # noqa: B018 - raises where there is nothing to learn

    def features(self, pooling: Pooling) -> _Features:
        if self._features is None or self._features.pooling != pooling:
            self._features = None  # before the next ones take memory
            self._features = _Features(self._data, pooling, self._max_rows)
        return self._features

    def rate(self, candidates: Sequence[Candidate]) -> list[tuple[Candidate, tuple[float, float]]]:
        """Ranks candidates of one pooling, verified where they would serve; drops those that a
        fold cannot train."""
        heads = {}
        for candidate in candidates:
            if fitted := self.features(candidate.pooling).fit_folds(candidate):
                heads[candidate] = fitted
            self._on_step()
        by_token = any(candidate.needs_no_segments for candidate in heads)
        drafts = [draft.by_token if by_token else draft for draft in self._data.drafts]
        found: dict[Candidate, list[list[float]]] = {candidate: [] for candidate in heads}
        for place, draft in enumerate(drafts):  # each draft's rows are read once
            hidden, fold = draft.load(), self._data.folds[place]
            for candidate, of_folds in heads.items():
                found[candidate].append(of_folds[fold].prefix_scores(draft, hidden))
        compared, bonus = Comparison(drafts, resamples=0), TOKEN_BONUS * by_token
        ranks = {one: compared.rank(scores) for one, scores in found.items()}
        return [(one, (kept + bonus, area)) for one, (kept, area) in ranks.items()]

    def score(self, heads: Sequence[HeadWeights], *, by_token: bool = False) -> Scores:
        """Scores each draft by the head of its fold, at its prefixes or at every token."""
        data = self._data
        return [
            heads[data.folds[place]].prefix_scores(
                draft.by_token if by_token else draft, draft.load()
            )
            for place, draft in enumerate(data.drafts)
        ]


class _Features:
    """Standardized features of a pooling's units, [units, parts * width + 2], and their labels."""

    def __init__(self, data: TrainingSet, pooling: Pooling, max_rows: int) -> None:
        self.pooling, self._data = pooling, data
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
        """One head per fold, on the others' drafts; empty if one of them has a single class.

        Args:
            size: fraction of the prompts that train.
        """
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
        if candidate.uses_scalars:
            places.append(self._parts * width + np.arange(2))
        used = np.concatenate(places)
        model = LogisticRegression(C=candidate.strength, max_iter=MAX_ITERATIONS)
        model.fit(self._values[np.ix_(rows, used)], self.labels[rows])
        coefficients = np.zeros(self._values.shape[1])
        coefficients[used] = model.coef_[0] / self._scaler.scale_[used]
        bias = float(model.intercept_[0]) - float(coefficients @ self._scaler.mean_)
        weights = coefficients[:-2].reshape(self._parts, width)[:, columns]
        return HeadWeights(
            *(candidate.pooling, weights.astype(np.float32)),
            scalars=coefficients[-2:].astype(np.float32),
            bias=bias,
            columns=columns,
        )

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
    starts = [0 if pooling == "running-mean" or not k else draft.prefix_ends[k - 1] for k in units]
    means = np.stack([tokens[a:b].mean(axis=0) for a, b in zip(starts, ends, strict=True)])
    if pooling == "segment-mean":
        return means
    return np.concatenate([means[:, : 2 * width], hidden[ends], means[:, 2 * width :]], axis=1)
