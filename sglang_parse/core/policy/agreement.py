"""Estimates how many draft tokens after a rejection point match the target's choices.

The verify pass computes the target's choice at every verified position. Draft tokens after the
accepted prefix that equal it are output together with the accepted tokens. In correct text the
target chooses another token at a constant rate. In a rejected segment it does so at the error at
the latest, unless the verdict was wrong. Observations decay with the tokens observed since.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

MISMATCH_RATE, MISMATCH_WEIGHT = 1 / 16, 8.0
"""Prior: mismatches per token of correct text, and its weight in tokens."""
PARTIAL_MATCH, REJECT_WEIGHT = 0.25, 1.0
"""Prior: matched fraction of a rejected part that does not match entirely, and its weight in
rejects."""


class AfterReject(NamedTuple):
    """Mean token counts after a rejection point.

    Attributes:
        num_matched: draft tokens that match and are output with the accepted prefix.
        max_matched: draft tokens that would match if the verified rest of the draft were correct.
    """

    num_matched: float
    max_matched: float


@dataclass(slots=True)
class Agreement:
    """Decayed match counts of one threshold's drafts.

    Attributes:
        accepted: accepted tokens.
        mismatched: accepted tokens that differ from the target's choice.
        rejects: drafts with a rejected prefix.
        full_matches: rejects whose first rejected part matched the target entirely.
        partial_match: sum of the matched fractions of the other rejects.
    """

    accepted: float = 0.0
    mismatched: float = 0.0
    rejects: float = 0.0
    full_matches: float = 0.0
    partial_match: float = 0.0

    def observe_accepted(self, num_tokens: int, num_mismatched: int) -> None:
        self.accepted += num_tokens
        self.mismatched += num_mismatched

    def observe_reject(self, rejected_len: int, num_matched: int) -> None:
        """Records a reject.

        Args:
            rejected_len: tokens from the accepted prefix to the end of the first rejected one.
            num_matched: matched tokens after the accepted prefix.
        """
        self.rejects += 1
        if num_matched >= rejected_len:
            self.full_matches += 1
        else:
            self.partial_match += num_matched / rejected_len

    def decay(self, factor: float) -> None:
        self.accepted *= factor
        self.mismatched *= factor
        self.rejects *= factor
        self.full_matches *= factor
        self.partial_match *= factor

    def after_reject(self, rejected_len: float, num_verified: float) -> AfterReject:
        """Estimates what follows a rejection point.

        Args:
            rejected_len: tokens to the end of the first rejected prefix.
            num_verified: verified tokens after the rejection point.
        """
        rate = self.mismatched + MISMATCH_WEIGHT * MISMATCH_RATE
        rate /= self.accepted + MISMATCH_WEIGHT
        full = self.full_matches / (self.rejects + REJECT_WEIGHT)
        partial = self.partial_match + REJECT_WEIGHT * PARTIAL_MATCH
        partial *= rejected_len / (self.rejects - self.full_matches + REJECT_WEIGHT)

        def matched(limit: float) -> float:
            """Mean tokens before the first mismatch, at most ``limit``."""
            return (1 - math.exp(-rate * limit)) / rate

        max_matched = matched(num_verified)
        return AfterReject(full * max_matched + (1 - full) * matched(partial), max_matched)
