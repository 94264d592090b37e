"""Labeled drafts, and their folds: by prompt, with errors in each. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from sklearn.model_selection import StratifiedGroupKFold

FOLDS = 5


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
        right: [K] None where a prefix has no label, as after the first wrong one.
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
    """Labeled drafts, and what their rows are; ``locates_tokens``: with a ``wrong_token``."""

    drafts: Sequence[LabeledDraft]
    layers: tuple[int, ...]
    hidden_size: int
    locates_tokens: bool

    @property
    def width(self) -> int:
        return len(self.layers) * self.hidden_size

    def columns(self, layers: Sequence[int]) -> np.ndarray:
        """Columns of these layers in a row."""
        by_layer = np.arange(self.width).reshape(len(self.layers), self.hidden_size)
        return by_layer[[self.layers.index(layer) for layer in layers]].ravel()

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
