"""Chooses and trains a verdict head on labeled drafts. Pure: out-of-fold scores and weights out.

Every candidate (``heads``) is rated by drafts that its folds held out (``drafts``); the best one is
tried with other settings, calibrated to log-odds, and trained on all drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from sklearn.linear_model import LogisticRegression

from sglang_parse.core.judge import LIKELIHOOD_BIAS, LIKELIHOOD_SCALARS, Pooling, pooled_scores
from sglang_parse.train_judge.drafts import LabeledDraft, NothingToLearnError, TrainingSet
from sglang_parse.train_judge.figures import Bootstrap, Scores
from sglang_parse.train_judge.heads import Candidate, Features, HeadWeights

OTHER_STRENGTHS = (0.0001, 0.001, 0.1)
"""Inverse regularizations that the best candidate is tried with, too."""
TOKEN_BONUS = 0.02
"""Added to the share of tokens kept that ranks a head which needs no segments: after an error the
target decodes one token, not the rest of a line (1.25 times the speed on the demo pair, at 16)."""
CURVE = (0.125, 0.25, 0.5)
"""Fractions of the prompts of the learning curve, beside all of them."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The outcome of a training.

    Attributes:
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


def train(data: TrainingSet, max_rows: int, on_step: Callable[[], None] = lambda: None) -> Trained:
    """Chooses, calibrates and trains a head; calls ``on_step`` ``num_steps`` times.

    Args:
        max_rows: most tokens of a draft that train a ``worst-token`` head.

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
    """Poolings that the labels can train: without located tokens only the mean over a prefix."""
    return ("worst-token", "running-mean") if data.locates_tokens else ("running-mean",)


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
        self._features: Features | None = None
        data.folds  # noqa: B018 - raises where there is nothing to learn

    def features(self, pooling: Pooling) -> Features:
        if self._features is None or self._features.pooling != pooling:
            self._features = None  # before the next ones take memory
            self._features = Features(self._data, pooling, self._max_rows)
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
        compared, bonus = Bootstrap(drafts, resamples=0), TOKEN_BONUS * by_token
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
