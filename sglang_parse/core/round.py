"""A round: a draft, and what its verify pass decided about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from sglang_parse.core.phases import Draft
from sglang_parse.core.selection import matching_tokens
from sglang_parse.core.strict import Refusal

CHANCE_MATCHES = 4
"""Fewer matched tokens than this after a rejected prefix are chance."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Verdicts on the prefixes of one draft.

    Attributes:
        values: [K] in [0, 1].
        mass: [K] p(accept) + p(reject); None where no question was asked.
        refusal: the first draft token that a strict class refuses, whatever these say.
    """

    values: Sequence[float] = ()
    mass: Sequence[float | None] = ()
    refusal: Refusal | None = None


@dataclass(frozen=True)
class Round:
    """A verified draft and what was output for it; of a decode step, no draft and its token.

    Of 9 draft tokens 8 were verified, the prefix of 5 refused and that of 3 accepted. The target
    chose the draft's next token, too, and then another one:

    >>> draft = Draft([10, 11, 12, 13, 14, 15, 16, 17, 18], prefix_ends=[3, 5, 8])
    >>> one = Round(draft, accepted_len=3, bonus=(13, 99))
    >>> one.reject_end, one.num_matched, one.num_output, one.tokens
    (5, 1, 4, (10, 11, 12, 13, 99))

    Attributes:
        accepted_len: leading draft tokens that the selection rule accepts.
        bonus: output tokens after them: draft tokens and candidates that match the target's
            choices, then the target's next one; none if the answer ends before.
        is_finished: all of the draft would complete the answer.
        verdicts: on the draft's prefixes; ``decided_by``: index of the deciding one, None if none
            decided; ``rule``: the applied key of ``SELECTIONS``, None if verdicts did not matter.
        target_tokens: [verified tokens + 1] the target's choice after each token.
        scores: [verified tokens + 1] each row's ``Scorer.scores`` and ``next_likelihoods``.
    """

    draft: Draft = field(default_factory=Draft)
    accepted_len: int = 0
    bonus: tuple[int, ...] = ()
    is_finished: bool = False
    verdicts: Verdicts = field(default_factory=Verdicts)
    decided_by: int | None = None
    rule: str | None = None
    target_tokens: Sequence[int] = ()
    scores: Sequence[Sequence[float]] = ()

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """What was output."""
        return (*self.draft.token_ids[: self.accepted_len], *self.bonus)

    @property
    def num_drafted(self) -> int:
        return len(self.draft.token_ids)

    @property
    def num_verified(self) -> int:
        """Draft tokens up to the last prefix's end."""
        return self.draft.num_verified

    @property
    def is_rejected(self) -> bool:
        """Whether a verified draft token was not accepted."""
        return self.accepted_len < self.num_verified

    @property
    def reject_end(self) -> int | None:
        """End of the first rejected prefix; None if every verified token is accepted."""
        if not self.is_rejected:
            return None
        ends = (end for end in self.draft.prefix_ends if end > self.accepted_len)
        return next(ends, self.accepted_len + 1)  # token by token there are no prefixes

    @cached_property
    def num_matched(self) -> int:
        """Verified tokens after the accepted prefix that match the target's choices."""
        return matching_tokens(self.draft.verified_ids[self.accepted_len :], self.bonus)

    @property
    def num_output(self) -> int:
        """Draft tokens that are output."""
        return min(self.accepted_len + self.num_matched, self.num_verified)

    @property
    def num_candidates_output(self) -> int:
        """Candidates behind the draft that are output."""
        return max(0, len(self.tokens) - 1 - self.num_drafted) if self.draft.candidates else 0

    @cached_property
    def parts(self) -> Sequence[Round]:
        """It; where a text extends its draft, what is before that tail, and the tail, if all before
        it is output.

        >>> draft = Draft([10, 11, 12, 13], "eagle3", tail_at=2, tail_source="prompt")
        >>> [(one.draft.source, one.tokens) for one in Round(draft, 3, bonus=(99,)).parts]
        [('eagle3', (10, 11, 12)), ('prompt', (12, 99))]
        """
        draft, at = self.draft, self.draft.tail_at
        if at is None:
            return (self,)
        own = replace(draft, token_ids=draft.verified_ids[:at], prefix_ends=[], question_ids=[])
        own.tail_at, own.tail_source = None, ""
        tail = Draft(draft.verified_ids[at:], draft.tail_source, draft.judge)
        kept, more = min(self.accepted_len, at), max(0, self.accepted_len - at)
        first = replace(self, draft=own, accepted_len=kept, bonus=self.tokens[kept : at + 1])
        if self.num_output < at:
            return (first,)
        bonus = self.tokens[at + more :]
        return first, replace(self, draft=tail, accepted_len=more, bonus=bonus)

    @property
    def has_failed(self) -> bool:
        """Whether nothing was accepted and no more than chance matched."""
        return not self.accepted_len and self.num_matched < CHANCE_MATCHES
