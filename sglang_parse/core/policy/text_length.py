"""Length of the next draft from a text: a prediction, an earlier answer, another server's draft.

Such a draft costs its verify pass and nothing else. Its length doubles from ``FIRST_TOKENS`` with
every whole draft that is accepted, and is rounded to whole segments: a verdict on half a line is
unreliable, so its tokens would be verified for nothing. How far drafts agree is learned by how well
the place in the text is known (``TextMatch.match_len``), for the server and, faster, for the
request. What a request has lost may not exceed a small part of what it has written, so that a text
that never fits costs little, whatever was learned from others.

The unit of all costs is the value of one token: a decode step at the present load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

FIRST_TOKENS, MIN_TOKENS = 16, 4
"""Longest draft before one was accepted whole; shortest draft."""
MAX_LOSS, LOSS_RATE = 0.75, 0.01
"""Tokens that a request may lose: at first, and per output token. A text that never fits then
costs 2 % at most of an answer of 64 tokens, half of that of a long one."""
MAX_GAIN = 8.0
"""Gained tokens that a request may lose again: drafts that stop to fit must end soon."""
MIN_GAIN = 0.1
"""Expected gain in tokens from which a draft is worth it."""
PRIOR_HITS = (0.9, 0.3, 0.5, 0.7, 0.9)
"""By strength: prior probability that a draft's first token is accepted."""
HIT_WEIGHT = 2.0
"""Weight of a prior, in drafts."""
ERROR_RATE, ERROR_WEIGHT = 1 / 24, 8.0
"""Prior: errors per draft token after the first, and its weight in tokens."""
DECAY = 0.99
"""Factor on the server's observations per draft."""


@dataclass(slots=True)
class Agreement:
    """Drafts of one strength that were verified.

    Attributes:
        prior: of the first token; ``prior_error``: of each token after it.
        drafts, hits: drafts, and those whose first token was accepted.
        tokens, errors: accepted tokens, and drafts that ended in an error after the first token.
    """

    prior: float
    prior_error: float = ERROR_RATE
    drafts: float = 0.0
    hits: float = 0.0
    tokens: float = 0.0
    errors: float = 0.0

    @property
    def hit_rate(self) -> float:
        return (self.hits + HIT_WEIGHT * self.prior) / (self.drafts + HIT_WEIGHT)

    @property
    def error_rate(self) -> float:
        errors = self.errors + ERROR_WEIGHT * self.prior_error
        return errors / (self.tokens + self.errors + ERROR_WEIGHT)

    def observe(self, num_drafted: int, num_accepted: int, decay: float = 1.0) -> None:
        for name in ("drafts", "hits", "tokens", "errors"):
            setattr(self, name, decay * getattr(self, name))
        self.drafts += 1
        if num_accepted:
            self.hits += 1
            self.tokens += num_accepted - 1
            self.errors += num_accepted < num_drafted

    def expect(self, num_drafted: int) -> float:
        """Mean accepted tokens of a draft."""
        survival = 1 - self.error_rate
        return self.hit_rate * (1 - survival**num_drafted) / (1 - survival)


def whole_segments(length: int, ends: Sequence[int]) -> int:
    """The length at the next segment's end if that is at most twice as long, else at the last
    one's; the length itself where a segment is longer."""
    later = next((end for end in ends if length <= end <= 2 * length), None)
    return later or max((end for end in ends if end <= length), default=length)


def strength_of(match_len: int) -> int:
    """How well the place is known: 0 followed, else 1 to 4 for as many newest tokens or more."""
    return min(match_len, len(PRIOR_HITS) - 1)


def _priors() -> list[Agreement]:
    return [Agreement(prior) for prior in PRIOR_HITS]


@dataclass(slots=True)
class SourceAgreement:
    """What a server has learned about one source: by strength."""

    by_strength: list[Agreement] = field(default_factory=_priors)

    def observe(self, match_len: int, num_drafted: int, num_accepted: int) -> None:
        found = self.by_strength[strength_of(match_len)]
        found.observe(num_drafted, num_accepted, DECAY)

    def for_request(self) -> Sequence[Agreement]:
        """A request starts from the server's rates."""
        return [Agreement(known.hit_rate, known.error_rate) for known in self.by_strength]


@dataclass(slots=True)
class TextLength:
    """Chooses the lengths of one request's drafts from one text.

    Attributes:
        agreement: its own, by strength.
        net_loss: tokens lost so far: costs of verify passes less accepted tokens.
        longest: longest draft that the next one may be.
        has_drafted: a draft was verified.
        max_loss, max_gain: see ``MAX_LOSS`` and ``MAX_GAIN``.
    """

    agreement: Sequence[Agreement]
    net_loss: float = 0.0
    longest: int = FIRST_TOKENS
    has_drafted: bool = False
    max_loss: float = MAX_LOSS
    max_gain: float = MAX_GAIN

    def choose(
        self,
        match_len: int,
        limit: int,
        num_written: int,
        extra_cost: Callable[[int], float],
        ends: Sequence[int] = (),
    ) -> int:
        """Draft tokens that are worth verifying, 0 for none.

        Args:
            match_len: see ``TextMatch``.
            limit: tokens that there are, or that are allowed.
            num_written: output tokens so far.
            extra_cost: cost of verifying that many draft tokens, beyond a decode step.
            ends: where segments end among the next ``2 * longest`` tokens, ascending; none where
                every token is verified.
        """
        if not limit or not self.can_lose(num_written):
            return 0
        known = self.agreement[strength_of(match_len)]
        longest = min(limit, self.longest)
        lengths = {longest}
        length = MIN_TOKENS
        while length < longest:
            lengths.add(length)
            length *= 2
        lengths = {whole_segments(length, ends) for length in lengths}
        left = self.max_loss + LOSS_RATE * num_written - self.net_loss
        affordable = [length for length in lengths if extra_cost(length) <= left]
        if not self.has_drafted and not match_len and not affordable:
            # What a pass costs is known from passes only: the estimate must not end them.
            return min(lengths)
        if not affordable:
            return 0

        def gain(length: int) -> float:
            return known.expect(length) - extra_cost(length)

        best = max(affordable, key=gain)
        return best if gain(best) >= MIN_GAIN else 0

    def can_lose(self, num_written: int) -> bool:
        """Whether the request may lose something more."""
        return self.net_loss < self.max_loss + LOSS_RATE * num_written

    def lose(self, cost: float) -> None:
        """Records a cost without a draft."""
        self.net_loss += cost

    def observe(self, match_len: int, num_drafted: int, num_accepted: int, cost: float) -> None:
        """Records a verified draft.

        Args:
            num_accepted: its tokens that were output.
            cost: its cost beyond a decode step.
        """
        self.has_drafted = True
        self.agreement[strength_of(match_len)].observe(num_drafted, num_accepted)
        self.net_loss = max(-self.max_gain, self.net_loss + cost - num_accepted)
        if num_accepted == num_drafted:
            self.longest = max(self.longest, 2 * num_drafted)
        else:
            self.longest = max(FIRST_TOKENS, self.longest // 2)
