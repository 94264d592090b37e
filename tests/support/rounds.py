"""Rounds by their counts, for tests of what learns from them."""

from __future__ import annotations

from sglang_parse.core.phases import MODEL, Draft
from sglang_parse.core.round import Round

DRAFTED, OTHER = 1, 0


def round_of(
    num_drafted: int,
    num_verified: int,
    accepted_len: int,
    reject_end: int | None = None,
    *,
    is_finished: bool = False,
    num_matched: int = 0,
    source: str = MODEL,
) -> Round:
    """A round of a draft of equal tokens.

    Args:
        reject_end: end of the first rejected prefix; by default the next token is refused.
    """
    ends = sorted({accepted_len, reject_end or accepted_len + 1, num_verified} - {0})
    draft = Draft(
        [DRAFTED] * num_drafted, source, prefix_ends=[n for n in ends if n <= num_verified]
    )
    bonus = (*[DRAFTED] * num_matched, OTHER)
    one = Round(draft, accepted_len, bonus, is_finished=is_finished)
    assert (one.num_verified, one.num_matched) == (num_verified, num_matched)
    return one
