"""Verdicts to cut: which prefix of the draft is kept. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Selection:
    """What is kept of a draft, and by whose word.

    Attributes:
        accepted_len: draft tokens kept.
        decided_by: index of the question that decided: its verdict accepts, and its prefix is kept,
            or rejects, and the prefix before it is. None where no verdict did.
        rule: the key of ``SELECTIONS`` that was applied to the verdicts; None where they were not
            asked.
    """

    accepted_len: int
    decided_by: int | None = None
    rule: str | None = None


def first_reject(accepted: Sequence[bool], _is_finished: bool) -> int:
    """The first question that rejects; the last one where none does.

    A late false accept cannot bring back text behind a rejected prefix: errors build up only in
    the direction that costs speed, not quality.
    """
    return accepted.index(False) if False in accepted else len(accepted) - 1


def longest_accepted(accepted: Sequence[bool], _is_finished: bool) -> int | None:
    """The last question that accepts."""
    return max((k for k, is_accepted in enumerate(accepted) if is_accepted), default=None)


def answer_first(accepted: Sequence[bool], is_finished: bool) -> int:
    """The question about the answer where it accepts, whatever the prefixes' do; else as
    ``first_reject``. The paper's rule, which asks about the prefixes only then.

    Args:
        accepted: per question, in the prefixes' order.
        is_finished: the draft is the finished answer, and the last question is about all of it.
    """
    if is_finished and accepted[-1]:
        return len(accepted) - 1
    return first_reject(accepted, is_finished)


SELECTIONS = {
    "first-reject": first_reject,
    "longest": longest_accepted,
    "answer-first": answer_first,
}
"""Rules: which question decides, if any does; there is at least one."""


def select(
    verdicts: Sequence[float],
    prefix_ends: Sequence[int],
    threshold: float,
    selection: str,
    *,
    is_finished: bool = False,
) -> Selection:
    """What one pass's verdicts keep of a draft: the selected prefix, or nothing.

    Args:
        verdicts: one per prefix, each in [0, 1].
        prefix_ends: ascending draft offsets, same length.
        threshold: smallest verdict that accepts. Above 1 accepts nothing.
        selection: a key of ``SELECTIONS``.
        is_finished: the draft model ended its answer: the last prefix is all of it.
    """
    if len(verdicts) != len(prefix_ends):
        raise ValueError(f"{len(verdicts)} verdicts for {len(prefix_ends)} prefixes")
    accepted = [verdict >= threshold for verdict in verdicts]  # never where it is NaN
    decided_by = SELECTIONS[selection](accepted, is_finished) if accepted else None
    if decided_by is None:
        return Selection(0, rule=selection)
    kept = decided_by + accepted[decided_by]
    return Selection(prefix_ends[kept - 1] if kept else 0, decided_by, selection)


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
