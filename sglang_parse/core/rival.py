"""Whether the exact token check would be faster than the judge, on the drafts that it judged."""

from __future__ import annotations

from dataclasses import dataclass

WINDOW = 64
"""Drafts after which both are compared: some 10 answers."""
MARGIN = 1.1
"""How much more the token check must output per target forward: less is not worth its wording."""


@dataclass(slots=True)
class Rival:
    """Counts of a window of verified drafts.

    Example: the target would have chosen another token every 12 tokens, the judge rejects one every
    32. With drafts of 16 the judge keeps 14 tokens of a draft, and the token check 9; but each
    rejection leaves a line, 8 tokens, to the target. 64 drafts then give 64 * 15 + 30 * 8 = 1,200
    tokens in 64 + 240 forwards, 4 a forward, where the token check gives 10.

    Attributes:
        drafts: verified drafts.
        rejections: of them.
        tokens: output of their verify passes, with bonus tokens.
        exact_tokens: what the token check would have output of the same drafts.
        steps: decode steps that ended a rejected segment, a token each.
    """

    drafts: int = 0
    rejections: int = 0
    tokens: int = 0
    exact_tokens: int = 0
    steps: int = 0

    def add(self, tokens: int, exact_tokens: int, *, is_rejected: bool) -> None:
        self.drafts += 1
        self.rejections += is_rejected
        self.tokens += tokens
        self.exact_tokens += exact_tokens

    @property
    def is_complete(self) -> bool:
        return self.drafts >= WINDOW

    @property
    def per_forward(self) -> float:
        return (self.tokens + self.steps) / (self.drafts + self.steps)

    @property
    def exact_per_forward(self) -> float:
        """The token check's: it drafts again behind every rejection."""
        return self.exact_tokens / self.drafts

    @property
    def wins(self) -> bool:
        return self.exact_per_forward > MARGIN * self.per_forward
