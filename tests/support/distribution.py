"""Sampled tokens against the exact distribution they were drawn from."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from scipy import stats

ACCEPTABLE_P = 1e-4
"""About sixty samples are tested per run: one false alarm in 150 runs."""


@dataclass(frozen=True)
class Rule:
    """A request's sampling parameters."""

    temperature: float = 0.8
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns [n, vocab] for logits [n, vocab]. As in SGLang's sampler, all filters are
        decided on the full distribution."""
        full = torch.softmax(logits.double() / self.temperature, dim=-1)
        kept = torch.tensor([self._kept(row) for row in full.tolist()])
        full[~kept] = 0
        return full / full.sum(-1, keepdim=True)

    def _kept(self, row: list[float]) -> list[bool]:
        kept = [False] * len(row)
        before, most = 0.0, max(row)
        # The sum of all but the last few tokens may round to more than 1.
        top_p = self.top_p if self.top_p < 1 else math.inf
        for rank, token in enumerate(sorted(range(len(row)), key=row.__getitem__, reverse=True)):
            in_top = (self.top_k < 0 or rank < self.top_k) and before <= top_p
            kept[token] = in_top and row[token] >= self.min_p * most
            before += row[token]
        return kept


@lru_cache(4096)
def _logits(model: Any, sequence: tuple[int, ...]) -> torch.Tensor:
    """Returns [len(sequence), vocab]; cached, because several rules are tried on a sample."""
    with torch.no_grad():
        return model(torch.tensor([sequence])).logits[0]


class Places:
    """Each sampled token's place in its exact distribution: uniform if and only if it is right.

    Randomized probability integral transform, the likeliest token first: the probability of all
    likelier ones + u * that of the token, given the tokens before it.
    """

    def __init__(self, model: Any, rule: Rule) -> None:
        self.model, self.rule = model, rule
        self.rng = random.Random(0)
        self.known: dict[tuple[int, ...], torch.Tensor] = {}
        self.values: list[float] = []

    def add(self, before: Sequence[int], sampled: Sequence[int]) -> None:
        """``sampled`` follow ``before``."""
        for place, token in enumerate(sampled):
            row = self._row((*before, *sampled[:place]), (*before, *sampled))
            assert row[token] > 0, f"token {token} is outside {self.rule}"
            below = float(row[row > row[token]].sum())
            self.values.append(below + self.rng.random() * float(row[token]))

    def _row(self, context: tuple[int, ...], sequence: tuple[int, ...]) -> torch.Tensor:
        if context not in self.known:
            first = len(context) - 1
            logits = _logits(self.model, sequence)[first:-1]
            for place, row in enumerate(self.rule.probabilities(logits), first):
                self.known[sequence[: place + 1]] = row
        return self.known[context]

    def pvalue(self) -> float:
        return stats.kstest(self.values, "uniform").pvalue
