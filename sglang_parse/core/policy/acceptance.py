"""Where drafts of one threshold were cut: how far the next ones are likely to be right.

Two hazards, events per draft token in bands of depth: that the draft goes wrong here, and that the
draft model ends its answer here. A cut says that the first wrong token lies between the last prefix
kept and the first rejected one, and that all before was right. What was seen fades with the tokens
seen since; a band that few drafts reached is as the whole account, and an account of nothing is as
its prior. No tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_parse.core.policy.agreement import Agreement, Behind

BAND_ENDS = (8, 16, 32, 64, 128, 256, 512, 1024, 8192)
"""Depths, in draft tokens, at which a band ends."""
MEMORY = 2000.0
"""Draft tokens in which what has been seen fades to a third, of ``FEW`` requests."""
FEW = 8
BAND_WEIGHT = 32.0
"""Tokens a band must have seen to count as much as the whole account."""
PRIOR = 1 / 16
"""Wrong tokens per token of a draft that nothing is known of."""
PRIOR_WEIGHT = 8.0
"""Tokens a prior counts as."""
ENDING = 1 / 256
"""The prior of a draft's end."""
USUAL_SEGMENT = 12.0
"""Tokens of a segment before one was seen."""
GUESSED = 4
"""Tokens that match by luck."""
NEWEST = 0.1
"""Weight of an observation in a mean."""
MOST_PLACES = 64
"""Places at which a draft judged token by token is looked at."""


class VerifyOutcome(NamedTuple):
    """A draft that was judged. Offsets are draft tokens.

    Attributes:
        drafted: tokens it held; ``judged``: those of them in front of its last prefix's end.
        segments: how many segments these were.
        cut: those that were kept.
        rejected: the end of the first rejected prefix; None where all that was judged is kept.
        is_finished: the draft model ended its answer with it.
        matched: of those behind the cut, how many the target would have written, too.
        differing: of those that were kept, how many it would have written otherwise.
    """

    num_drafted: int
    num_verified: int
    num_segments: int
    accepted_len: int
    reject_end: int | None
    is_finished: bool
    num_matched: int = 0
    num_mismatched: int = 0

    @property
    def has_failed(self) -> bool:
        """Whether it was good for nothing, but for a few tokens that anybody would have guessed."""
        return not self.accepted_len and self.num_matched < GUESSED


@dataclass(slots=True)
class ErrorRate:
    """Events per token, by depth."""

    events: list[float] = field(default_factory=lambda: [0.0] * len(BAND_ENDS))
    seen: list[float] = field(default_factory=lambda: [0.0] * len(BAND_ENDS))

    def add(self, depth: float, *, has_event: bool) -> None:
        """Nothing happened before this depth; then it did, or nobody looked further."""
        start = 0
        for band, end in enumerate(BAND_ENDS):
            self.seen[band] += max(0.0, min(depth, end) - start)
            if has_event and start <= depth < end:
                self.events[band] += 1
            start = end

    def fade(self, left: float) -> None:
        """What was seen counts that much less."""
        self.events = [left * value for value in self.events]
        self.seen = [left * value for value in self.seen]

    def mean(self, prior: float) -> float:
        """At all depths together."""
        return (sum(self.events) + PRIOR_WEIGHT * prior) / (sum(self.seen) + PRIOR_WEIGHT)

    def rates(self, prior: float) -> list[float]:
        """Per band."""
        mean = self.mean(prior)
        return [
            (events + BAND_WEIGHT * mean) / (seen + BAND_WEIGHT)
            for events, seen in zip(self.events, self.seen, strict=True)
        ]


class Expected(NamedTuple):
    """What a round is expected to be: means.

    Attributes:
        drafted: draft tokens; ``judged``: those in front of the last prefix's end; ``kept``: those
            that are kept.
        reject_prob: the chance that some of what is judged is rejected.
        own: the chance that the target's own next token follows.
        behind: of what is judged, tokens behind a cut, where there is one.
        prefixes: how many are judged; ``spacing``: tokens between their ends.
    """

    drafted: float
    judged: float
    kept: float
    reject_prob: float
    own: float
    behind: float
    prefixes: float
    spacing: float


@dataclass(slots=True)
class AcceptanceModel:
    """The account of one threshold.

    Attributes:
        prior: wrong tokens per token before anything was seen.
        rounds: judged drafts.
        segment: mean tokens of a segment.
        rest: mean tokens from a cut to where the target ends its segment.
        agreement: how far the target agrees behind a cut.
    """

    prior: float = PRIOR
    rounds: int = 0
    segment: float = USUAL_SEGMENT
    rest: float = USUAL_SEGMENT
    agreement: Agreement = field(default_factory=Agreement)
    _wrong: ErrorRate = field(default_factory=ErrorRate)
    _over: ErrorRate = field(default_factory=ErrorRate)
    _expected: dict[tuple[int, int, bool], Expected] = field(default_factory=dict)

    @property
    def hazard(self) -> float:
        """Wrong tokens per token, at all depths together."""
        return self._wrong.mean(self.prior)

    def add(self, judged: VerifyOutcome, num_running: int = 1) -> None:
        """A draft was judged, one of so many requests'.

        Those that run at the same time began together, perhaps, and are as far: what one of them
        shows is forgotten no sooner than what all show.
        """
        self.rounds += 1
        self._expected.clear()
        left = math.exp(-judged.num_drafted * FEW / max(FEW, num_running) / MEMORY)
        for seen in (self._wrong, self._over, self.agreement):
            seen.fade(left)
        # Somewhere in the first rejected stretch, whose segments nobody asked about one by one.
        wrong = (
            judged.accepted_len
            if judged.reject_end is None
            else (judged.accepted_len + judged.reject_end - 1) // 2
        )
        self._wrong.add(wrong, has_event=judged.reject_end is not None)
        self._over.add(judged.num_drafted, has_event=judged.is_finished)
        self.agreement.observe_accepted(judged.accepted_len, judged.num_mismatched)
        if judged.reject_end is not None:
            self.agreement.observe_reject(
                judged.reject_end - judged.accepted_len, judged.num_matched
            )
        # Not of all that was drafted: a short draft ends in the middle of one.
        self.segment += NEWEST * (judged.num_verified / max(1, judged.num_segments) - self.segment)

    def add_rest(self, num_tokens: int) -> None:
        """The target finished the segment after a cut."""
        self.rest += NEWEST * (num_tokens - self.rest)

    def expect(self, draft_tokens: int, max_prefixes: int, *, by_token: bool = False) -> Expected:
        """A round of at most so many draft tokens and prefixes, their ends evenly spaced.

        Args:
            by_token: every token is judged and no question is asked (token mode).
        """
        key = draft_tokens, max_prefixes, by_token
        if key not in self._expected:  # asked for often while drafting is suspended, and as it was
            self._expected[key] = self._expect(*key)
        return self._expected[key]

    def _expect(self, draft_tokens: int, max_prefixes: int, by_token: bool) -> Expected:
        wrong, over = self._wrong.rates(self.prior), self._over.rates(ENDING)
        segment = 1.0 if by_token else max(1.0, self.segment)
        count = max(1, int(draft_tokens / segment))
        last = min(count * segment, float(draft_tokens))
        places = min(count, MOST_PLACES if by_token else max_prefixes)
        judged = kept = before = 0.0
        for place in range(1, places + 1):
            end = last * place / places
            length = (end - before) * (_still(over, before) + _still(over, end)) / 2
            judged += length
            kept += length * _still(wrong, end)
            before = end
        right = _still(wrong, last if places == 1 else judged)
        behind = judged - (kept - right * judged) / max(1e-9, 1 - right)
        going_on = _still(over, last)
        drafted = judged + going_on * (draft_tokens - last)
        asked = max(1.0, places * min(1.0, drafted / draft_tokens))
        own = 1 - right * (1 - going_on)
        behind = min(max(0.0, behind), judged)
        return Expected(drafted, judged, kept, 1 - right, own, behind, asked, last / places)

    def behind(self, expected: Expected) -> Behind:
        """What follows a cut in such a round."""
        return self.agreement.behind(expected.spacing, expected.behind, self.rest)


def _still(rates: Sequence[float], depth: float) -> float:
    """The chance that nothing has happened before this depth."""
    total, start = 0.0, 0
    for rate, end in zip(rates, BAND_ENDS, strict=True):
        if depth <= start:
            break
        total += rate * (min(depth, end) - start)
        start = end
    return math.exp(-total)
