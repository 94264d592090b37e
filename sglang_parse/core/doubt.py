"""Doubt: where the draft model is unsure of its own tokens, and a draft had better end.

What is known of a draft token is its level, the octave of its odds p / (1 - p), where p is the
probability that the draft model gave it: 0 below 1 : 2, 2 from 1 : 1, 12 from 1024 : 1. A device
reports -log p, so that few operations suffice.

>>> [round(own_chance(level), 3) for level in (0, 2, 5, 12)]
[0.261, 0.586, 0.919, 0.999]

Numbers only.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

LEVELS, LOWEST = 13, -2
"""Number of levels, and the octave of the first one, which includes all below."""
UNITS = 2**20
"""Of a surprisal, to a nat."""
_HIGHEST = [
    UNITS * math.log1p(2.0 ** -(level + LOWEST)) for level in range(LEVELS - 1, 0, -1)
]  # surprisals of the levels, the last one first


def level_of(surprisal: int) -> int:
    """Level of a token of probability p, whose surprisal is -log p in ``UNITS``.

    >>> [level_of(int(-math.log(p) * UNITS)) for p in (0.2, 0.6, 0.9, 0.9999)]
    [0, 2, 5, 12]
    """
    return LEVELS - 1 - bisect_left(_HIGHEST, surprisal)


def own_chance(level: int) -> float:
    """The draft model's probability in the middle of a level."""
    odds = 2.0 ** (level + LOWEST + 0.5)
    return odds / (1 + odds)


class Chances:
    """Chances that a draft token is accepted behind accepted ones, by its level: learned from
    verified drafts, beside each level's own chance, which counts as one token."""

    def __init__(self) -> None:
        self._own = [*map(own_chance, range(LEVELS))]
        self._accepted, self._seen = [0.0] * LEVELS, [0.0] * LEVELS

    def observe(self, levels: Sequence[int], num_output: int, keep: float) -> None:
        """Records a draft, of whose tokens ``num_output`` were output and the next one was not;
        ``keep``: weight of earlier drafts."""
        self._accepted = [keep * count for count in self._accepted]
        self._seen = [keep * count for count in self._seen]
        for place, level in enumerate(levels[: num_output + 1]):
            self._accepted[level] += place < num_output
            self._seen[level] += 1

    def by_level(self) -> list[float]:
        counts = zip(self._own, self._accepted, self._seen, strict=True)
        return [(own + accepted) / (1 + seen) for own, accepted, seen in counts]


@dataclass(frozen=True, slots=True)
class Doubt:
    """When drafts end: when one more token of them costs more than it brings.

    Attributes:
        chances: [LEVELS] that a token of a level is accepted behind accepted ones.
        least: cost of one more token, in output tokens: the least chance, in the mean of the
            drafts that go on together, that all of a draft is accepted.
    """

    chances: Sequence[float]
    least: float


def are_in_doubt(drafts: Sequence[tuple[float, Doubt | None]]) -> bool:
    """Whether drafts that go on together end: their forwards are shared. ``drafts`` has of each the
    chance that all of it is accepted, and when it ends; None for never.

    >>> doubt = Doubt([0.5] * LEVELS, least=0.3)
    >>> are_in_doubt([(0.25, doubt)]), are_in_doubt([(0.25, doubt), (0.5, doubt)])
    (True, False)
    """
    least = [doubt.least for _, doubt in drafts if doubt]
    is_ended = len(least) == len(drafts) > 0
    return is_ended and sum(chance for chance, _ in drafts) < sum(least)
