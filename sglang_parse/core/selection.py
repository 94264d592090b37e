"""Verdicts to cut: which prefix of the draft is kept. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def first_reject(verdicts: Sequence[float], threshold: float) -> int:
    """Number of prefixes before the first one whose verdict is below ``threshold``.

    A late false accept cannot bring back text behind a rejected prefix: errors build up only in
    the direction that costs speed, not quality.
    """
    for kept, verdict in enumerate(verdicts):
        if not verdict >= threshold:  # a NaN verdict accepts nothing either
            return kept
    return len(verdicts)


def longest_accepted(verdicts: Sequence[float], threshold: float) -> int:
    """Number of prefixes up to and including the last one at or above ``threshold``."""
    for kept in range(len(verdicts), 0, -1):
        if verdicts[kept - 1] >= threshold:
            return kept
    return 0


SELECTIONS = {"first-reject": first_reject, "longest": longest_accepted}


def select_cut(
    verdicts: Sequence[float], prefix_ends: Sequence[int], threshold: float, selection: str
) -> int:
    """Number of draft tokens kept: the end of the selected prefix, 0 when none is.

    Args:
        verdicts: one per prefix, each in [0, 1].
        prefix_ends: ascending draft offsets, same length.
        threshold: smallest verdict that accepts. Above 1 accepts nothing.
        selection: a key of ``SELECTIONS``.
    """
    if len(verdicts) != len(prefix_ends):
        raise ValueError(f"{len(verdicts)} verdicts for {len(prefix_ends)} prefixes")
    kept = SELECTIONS[selection](verdicts, threshold)
    return prefix_ends[kept - 1] if kept else 0


def matching_tokens(draft: Sequence[int], target_choice: Sequence[int]) -> int:
    """Token-level verification: how many leading draft tokens equal the target's own choice.

    Args:
        draft: [m] token ids the draft model wrote.
        target_choice: [>= m] token ids the target chose at the same places, given the draft so
            far: ``target_choice[i]`` competes with ``draft[i]``.
    """
    matched = 0
    for drafted, chosen in zip(draft, target_choice, strict=False):
        if drafted != chosen:
            break
        matched += 1
    return matched
