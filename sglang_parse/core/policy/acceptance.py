"""Models how many draft tokens of one threshold are accepted.

Two event rates per draft token, by depth bands: an error in the draft, and the end of the draft
model's answer. A reject places the first error between the last accepted and the first rejected
prefix. Observations decay with the tokens observed since. A band with few observations falls back
to the mean of all bands, and that to its prior.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_parse.core.policy.agreement import AfterReject, Agreement

BAND_ENDS = (8, 16, 32, 64, 128, 256, 512, 1024, 8192)
"""Ends of the depth bands, in draft tokens."""
MEMORY_TOKENS = 2000.0
"""Draft tokens of ``MEMORY_REQUESTS`` requests in which observations decay to 1/e."""
MEMORY_REQUESTS = 8
BAND_WEIGHT = 32.0
"""Weight of the mean of all bands in one band's rate, in tokens."""
ERROR_RATE = 1 / 16
"""Prior: errors per draft token."""
PRIOR_WEIGHT = 8.0
"""Weight of a prior, in tokens."""
END_RATE = 1 / 256
"""Prior: answer ends per draft token."""
SEGMENT_LEN = 12.0
"""Initial segment length, in tokens."""
CHANCE_MATCHES = 4
"""Fewer matched tokens than this are chance."""
EMA_WEIGHT = 0.1
MAX_EVALUATED_PREFIXES = 64
"""Prefixes evaluated in token mode, where every token is one."""


class VerifyOutcome(NamedTuple):
    """The result of one verified draft. Ends are draft offsets.

    Attributes:
        num_drafted: draft tokens.
        num_verified: draft tokens up to the last prefix's end.
        num_segments: segments among the verified tokens.
        accepted_len: accepted draft tokens.
        reject_end: end of the first rejected prefix; None if every verified token is accepted.
        is_finished: the draft ends the answer.
        num_matched: verified tokens after the accepted prefix that match the target's choices.
        num_mismatched: accepted tokens that differ from the target's choices.
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
        """Whether nothing was accepted and no more than chance matched."""
        return not self.accepted_len and self.num_matched < CHANCE_MATCHES


@dataclass(slots=True)
class RateByDepth:
    """Events per token, by depth band."""

    events: list[float] = field(default_factory=lambda: [0.0] * len(BAND_ENDS))
    tokens: list[float] = field(default_factory=lambda: [0.0] * len(BAND_ENDS))

    def observe(self, depth: float, *, has_event: bool) -> None:
        """Records ``depth`` tokens without an event, then an event or the end of observation."""
        start = 0
        for band, end in enumerate(BAND_ENDS):
            self.tokens[band] += max(0.0, min(depth, end) - start)
            if has_event and start <= depth < end:
                self.events[band] += 1
            start = end

    def decay(self, factor: float) -> None:
        self.events = [factor * value for value in self.events]
        self.tokens = [factor * value for value in self.tokens]

    def mean(self, prior: float) -> float:
        return (sum(self.events) + PRIOR_WEIGHT * prior) / (sum(self.tokens) + PRIOR_WEIGHT)

    def by_band(self, prior: float) -> list[float]:
        mean = self.mean(prior)
        return [
            (events + BAND_WEIGHT * mean) / (tokens + BAND_WEIGHT)
            for events, tokens in zip(self.events, self.tokens, strict=True)
        ]


class ExpectedRound(NamedTuple):
    """Expected token counts of one round.

    Attributes:
        num_drafted: draft tokens.
        num_verified: draft tokens up to the last prefix's end.
        num_accepted: accepted draft tokens.
        reject_prob: probability of a rejected prefix.
        num_bonus: bonus tokens: one unless the accepted draft ends the answer.
        num_after_reject: verified tokens after the rejection point, if there is one.
        num_prefixes: verified prefixes.
        prefix_spacing: tokens between prefix ends.
    """

    num_drafted: float
    num_verified: float
    num_accepted: float
    reject_prob: float
    num_bonus: float
    num_after_reject: float
    num_prefixes: float
    prefix_spacing: float


@dataclass(slots=True)
class AcceptanceModel:
    """Acceptance statistics of one threshold.

    Attributes:
        prior: error rate before any observation.
        num_rounds: verified drafts.
        segment_len: mean tokens per segment.
        agreement: matched tokens after a rejection point.
    """

    prior: float = ERROR_RATE
    num_rounds: int = 0
    segment_len: float = SEGMENT_LEN
    agreement: Agreement = field(default_factory=Agreement)
    _errors: RateByDepth = field(default_factory=RateByDepth)
    _ends: RateByDepth = field(default_factory=RateByDepth)
    _expected: dict[tuple[int, int, bool], ExpectedRound] = field(default_factory=dict)

    @property
    def error_rate(self) -> float:
        """Errors per draft token at all depths."""
        return self._errors.mean(self.prior)

    def observe_round(self, outcome: VerifyOutcome, num_running: int = 1) -> None:
        """Records a verified draft of one of ``num_running`` requests.

        Concurrent requests often started together and are at the same depth, so decay slows down
        with their number: one round of all of them must not displace the rest.
        """
        self.num_rounds += 1
        self._expected.clear()
        num_requests = max(MEMORY_REQUESTS, num_running)
        factor = math.exp(-outcome.num_drafted * MEMORY_REQUESTS / num_requests / MEMORY_TOKENS)
        for observed in (self._errors, self._ends, self.agreement):
            observed.decay(factor)
        # The error may be anywhere in the first rejected part; assume its middle.
        first_error = (
            outcome.accepted_len
            if outcome.reject_end is None
            else (outcome.accepted_len + outcome.reject_end - 1) // 2
        )
        self._errors.observe(first_error, has_event=outcome.reject_end is not None)
        self._ends.observe(outcome.num_drafted, has_event=outcome.is_finished)
        self.agreement.observe_accepted(outcome.accepted_len, outcome.num_mismatched)
        if outcome.reject_end is not None:
            rejected_len = outcome.reject_end - outcome.accepted_len
            self.agreement.observe_reject(rejected_len, outcome.num_matched)
        # The unverified end of a draft is not a whole segment.
        segment_len = outcome.num_verified / max(1, outcome.num_segments)
        self.segment_len += EMA_WEIGHT * (segment_len - self.segment_len)

    def expect(
        self, draft_tokens: int, max_prefixes: int, *, every_token: bool = False
    ) -> ExpectedRound:
        """Estimates a round with at most this many draft tokens and evenly spaced prefixes."""
        key = draft_tokens, max_prefixes, every_token
        if key not in self._expected:  # queried at every token while drafting is suspended
            self._expected[key] = self._expect(*key)
        return self._expected[key]

    def _expect(self, draft_tokens: int, max_prefixes: int, every_token: bool) -> ExpectedRound:
        errors, ends = self._errors.by_band(self.prior), self._ends.by_band(END_RATE)
        segment_len = 1.0 if every_token else max(1.0, self.segment_len)
        num_segments = max(1, int(draft_tokens / segment_len))
        last_end = min(num_segments * segment_len, float(draft_tokens))
        num_prefixes = min(num_segments, MAX_EVALUATED_PREFIXES if every_token else max_prefixes)
        num_evaluated = min(num_prefixes, MAX_EVALUATED_PREFIXES)
        verified = accepted = start = 0.0
        for k in range(1, num_evaluated + 1):
            end = last_end * k / num_evaluated
            length = (end - start) * (_survival(ends, start) + _survival(ends, end)) / 2
            verified += length
            accepted += length * _survival(errors, end)
            start = end
        accept_prob = _survival(errors, last_end if num_prefixes == 1 else verified)
        after_reject = verified - (accepted - accept_prob * verified) / max(1e-9, 1 - accept_prob)
        unfinished_prob = _survival(ends, last_end)
        drafted = verified + unfinished_prob * (draft_tokens - last_end)
        return ExpectedRound(
            num_drafted=drafted,
            num_verified=verified,
            num_accepted=accepted,
            reject_prob=1 - accept_prob,
            num_bonus=1 - accept_prob * (1 - unfinished_prob),
            num_after_reject=min(max(0.0, after_reject), verified),
            num_prefixes=max(1.0, num_prefixes * min(1.0, drafted / draft_tokens)),
            prefix_spacing=last_end / num_prefixes,
        )

    def after_reject(self, expected: ExpectedRound) -> AfterReject:
        """Estimates what follows a rejection point in such a round."""
        return self.agreement.after_reject(expected.prefix_spacing, expected.num_after_reject)


def _survival(rates: Sequence[float], depth: float) -> float:
    """Returns the probability of no event before ``depth``."""
    total, start = 0.0, 0
    for rate, end in zip(rates, BAND_ENDS, strict=True):
        if depth <= start:
            break
        total += rate * (min(depth, end) - start)
        start = end
    return math.exp(-total)
