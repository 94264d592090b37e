"""Selects the accepted prefix of a draft from its verdicts."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from itertools import takewhile


def first_reject(accepted: Sequence[bool], _is_finished: bool) -> int:
    """Returns the first verdict that rejects, else the last one.

    A false accept after a rejected prefix has no effect: wrong rejects cost speed, not quality.
    """
    return accepted.index(False) if False in accepted else len(accepted) - 1


def answer_first(accepted: Sequence[bool], is_finished: bool) -> int:
    """Returns the last verdict if it is about the finished answer and accepts, else
    ``first_reject``.

    The paper's rule; the paper verifies prefixes only if the answer is rejected.
    """
    if is_finished and accepted[-1]:
        return len(accepted) - 1
    return first_reject(accepted, is_finished)


SELECTIONS = {"first-reject": first_reject, "answer-first": answer_first}
"""Rules that return the index of the deciding verdict; called with at least one."""


def select(
    verdicts: Sequence[float],
    prefix_ends: Sequence[int],
    threshold: float,
    selection: str,
    *,
    is_finished: bool = False,
    refused_at: int | None = None,
) -> tuple[int, int | None]:
    """Selects the accepted prefix of a draft.

    >>> select([0.9, 0.2, 0.8], [4, 9, 12], 0.5, "first-reject")
    (4, 1)

    Args:
        verdicts: [K] in [0, 1].
        prefix_ends: [K] ascending draft offsets.
        threshold: minimum verdict that accepts; above 1 nothing is accepted.
        selection: a key of ``SELECTIONS``.
        is_finished: the last prefix is the finished answer.
        refused_at: place of a draft token that may not be accepted, whatever the verdicts.

    Returns:
        Its length, and the index of the deciding verdict: it accepts its prefix, or it rejects and
        the prefix before it is accepted; None if no verdict decided.
    """
    if len(verdicts) != len(prefix_ends):
        raise ValueError(f"{len(verdicts)} verdicts for {len(prefix_ends)} prefixes")
    limit = math.inf if refused_at is None else refused_at
    pairs = zip(verdicts, prefix_ends, strict=True)
    accepted = [verdict >= threshold and end <= limit for verdict, end in pairs]  # False for NaN
    if not accepted:
        return 0, None
    decided_by = SELECTIONS[selection](accepted, is_finished)
    num_accepted = decided_by + accepted[decided_by]
    accepted_len = prefix_ends[num_accepted - 1] if num_accepted else 0
    return accepted_len, decided_by


def matching_tokens(draft: Sequence[int], target_choice: Sequence[int]) -> int:
    """Returns how many leading draft tokens equal the target's choices.

    Args:
        draft: [m] draft token ids.
        target_choice: [>= m] the target's choice at each position, given the draft before it.
    """
    is_equal = (drafted == chosen for drafted, chosen in zip(draft, target_choice, strict=False))
    return sum(takewhile(bool, is_equal))


def up_to_stop(tokens: Sequence[int], stop_ids: Container[int]) -> tuple[int, ...]:
    """Returns the tokens up to the first stop token, which is included."""
    ends = (place for place, token in enumerate(tokens, start=1) if token in stop_ids)
    return tuple(tokens[: next(ends, len(tokens))])


HIGH_REJECT_RATIO = 0.5
"""Rejected / all prefixes that the target would have written itself from which the question does
not work for it."""


def contradicts_target(num_matched: int, num_rejected: int) -> bool:
    """Whether the question does not work for the target, by the counts of ``matched_prefixes``."""
    return num_matched > 0 and num_rejected / num_matched >= HIGH_REJECT_RATIO


def matched_prefixes(
    prefix_ends: Sequence[int], verdicts: Sequence[float], threshold: float, num_matched: int
) -> tuple[int, int]:
    """Counts the prefixes that the target would have written itself, and the rejected ones of them.

    A verdict below the threshold on such a prefix contradicts the target's choices.

    Args:
        prefix_ends: [K] ascending draft offsets.
        verdicts: [K] in [0, 1].
        threshold: minimum verdict that accepts.
        num_matched: leading draft tokens that equal the target's choices.
    """
    matched = [v for end, v in zip(prefix_ends, verdicts, strict=True) if end <= num_matched]
    return len(matched), sum(verdict < threshold for verdict in matched)
