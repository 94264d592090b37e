"""Chooses and trains a verdict head on labeled drafts. Pure: out-of-fold scores and weights out.

Every candidate (``heads``) is rated by drafts that its folds held out (``drafts``); the best one is
tried with other strengths, calibrated to log-odds, and trained on all drafts.
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
CURVE = (0.125, 0.25, 0.5, 1.0)
"""Fractions of the prompts of the learning curve; the last one is all of them."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The outcome of a training.

    Attributes:
        head: trained on all drafts; its scores are log-odds that a prefix is right.
        scores: of heads that saw no draft of the same prompt, as log-odds.
        served_scores: the same of every prefix where such a head serves (``Candidate.served``).
        curve: (mean number of drafts that trained, scores) at fractions of the prompts.
        tried: every candidate with its rank, best first.
    """

    candidate: Candidate
    head: HeadWeights
    scores: Scores
    served_scores: Scores
    curve: Sequence[tuple[int, Scores]]
    tried: Sequence[tuple[Candidate, tuple[float, float]]]


def likelihood_scores(draft: LabeledDraft) -> list[float]:
    """[K] scores of the reader that needs no training."""
    tokens = draft.scalars @ np.array(LIKELIHOOD_SCALARS) + LIKELIHOOD_BIAS
    return pooled_scores("worst-token", tokens.tolist(), (), draft.prefix_ends)


def train(data: TrainingSet, max_rows: int, on_step: Callable[[], None] = lambda: None) -> Trained:
    """Chooses, calibrates and trains a head, a ``worst-token`` one on at most ``max_rows`` tokens
    of a draft; calls ``on_step`` ``num_steps`` times.

    Raises:
        NothingToLearnError: there are not enough labels of both kinds, or the best head's scores
            are no higher where a prefix is right.
    """
    data.folds  # noqa: B018 - raises where there is nothing to learn
    tried = []
    for group in first_candidates(data):
        tried += rate(data, Features(data, group[0].pooling, max_rows), group, on_step)
    if not tried:
        raise NothingToLearnError("no fold has both right and wrong labels")
    best = max(tried, key=lambda one: one[1])[0]
    features = Features(data, best.pooling, max_rows)
    others = [replace(best, strength=strength) for strength in OTHER_STRENGTHS]
    tried += rate(data, features, others, on_step)
    tried.sort(key=lambda one: one[1], reverse=True)
    candidate = tried[0][0]
    sized = {size: heads for size in CURVE if (heads := features.fit_folds(candidate, size))}
    found = held_out_scores(data, candidate.served(data.drafts), [*sized.values()])
    curve = [at_prefixes(data, candidate, scores) for scores in found]
    slope, offset = platt(data.drafts, curve[-1])

    def as_log_odds(scores: Scores) -> Scores:
        return [[slope * score + offset for score in draft] for draft in scores]

    head = features.fit(candidate, np.ones(len(features.labels), bool))
    on_step()
    return Trained(
        candidate=candidate,
        head=head.rescaled(slope, offset),
        scores=as_log_odds(curve[-1]),
        served_scores=as_log_odds(found[-1]),
        curve=[*zip(map(features.mean_drafts, sized), curve, strict=True)],
        tried=tried,
    )


def first_candidates(data: TrainingSet) -> list[list[Candidate]]:
    """Each layer, all of them, and none, by pooling; without located tokens only the mean over a
    prefix can be trained."""
    subsets = dict.fromkeys([(), *((layer,) for layer in data.layers), data.layers])
    poolings: list[Pooling] = ["worst-token"] if data.locates_tokens else []
    poolings.append("running-mean")
    return [[Candidate(pooling, layers) for layers in subsets] for pooling in poolings]


def num_steps(data: TrainingSet) -> int:
    """Calls of ``on_step``."""
    return sum(map(len, first_candidates(data))) + len(OTHER_STRENGTHS) + 1


def rate(
    data: TrainingSet,
    features: Features,
    candidates: Sequence[Candidate],
    on_step: Callable[[], None],
) -> list[tuple[Candidate, tuple[float, float]]]:
    """Ranks candidates of one pooling, verified where they would serve; drops those that a fold
    cannot train."""
    heads = {}
    for candidate in candidates:
        if fitted := features.fit_folds(candidate):
            heads[candidate] = fitted
        on_step()
    drafts = candidates[0].served(data.drafts)
    bonus = TOKEN_BONUS * candidates[0].needs_no_segments
    ranks = map(
        Bootstrap(drafts, resamples=0).rank, held_out_scores(data, drafts, [*heads.values()])
    )
    return [(one, (kept + bonus, area)) for one, (kept, area) in zip(heads, ranks, strict=True)]


def held_out_scores(
    data: TrainingSet, drafts: Sequence[LabeledDraft], readers: Sequence[Sequence[HeadWeights]]
) -> Sequence[Scores]:
    """Scores of each reader, which is a head per fold; each scores the drafts that it never saw.
    ``drafts``: those of ``data``, verified where the heads serve."""
    found: list[list[list[float]]] = [[] for _ in readers]
    for draft, fold in zip(drafts, data.folds, strict=True):
        hidden = draft.load()  # once: it may come from disk
        for scores, heads in zip(found, readers, strict=True):
            scores.append(heads[fold].prefix_scores(draft, hidden))
    return found


def at_prefixes(data: TrainingSet, candidate: Candidate, served: Scores) -> Scores:
    """The scores of the drafts' own prefixes among those where the candidate serves."""
    if not candidate.needs_no_segments:
        return served
    pairs = zip(data.drafts, served, strict=True)
    return [[scores[end - 1] for end in draft.prefix_ends] for draft, scores in pairs]


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
