"""How far the target agrees with a draft behind its cut: what a rejected draft is still worth.

The pass shows the target's own choice behind every judged token, so all that it would have written
itself comes with the cut. In text that is right it chooses another token now and then; where the
text goes wrong it does so at the latest, unless the verdict was wrong about that. What was seen
fades with the tokens seen since. No tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

DIFFERING, DIFFERING_WEIGHT = 1 / 16, 8.0
"""Other choices per token of right text before any was seen, and the tokens that counts as."""
THROUGH, CUTS_WEIGHT = 0.25, 1.0
"""How far into a rejected stretch the target agrees, and never all through, before a cut was seen;
and the cuts that counts as."""


class Behind(NamedTuple):
    """What follows a cut: means, in tokens.

    Attributes:
        matched: come with it, as the target would have written them, too.
        written: the target writes then, until its segment is done.
        reach: matched where nothing is wrong.
    """

    matched: float
    written: float
    reach: float


@dataclass(slots=True)
class Agreement:
    """Of one threshold's drafts.

    Attributes:
        kept: tokens of what was kept; ``differing``: those the target would have written otherwise.
        cuts: drafts that were cut; ``whole``: those with whose first rejected stretch the target
            agreed all the same; ``through``: of the others' stretches, the shares it agreed with.
    """

    kept: float = 0.0
    differing: float = 0.0
    cuts: float = 0.0
    whole: float = 0.0
    through: float = 0.0

    def observe_accepted(self, num_tokens: int, differing: int) -> None:
        """So many tokens were kept; so many of them the target would have written otherwise."""
        self.kept += num_tokens
        self.differing += differing

    def observe_reject(self, stretch: int, matched: int) -> None:
        """A stretch of so many tokens was the first that was rejected; so many behind the cut the
        target would have written itself."""
        self.cuts += 1
        if matched >= stretch:
            self.whole += 1
        else:
            self.through += matched / stretch

    def fade(self, left: float) -> None:
        """What was seen counts that much less."""
        self.kept *= left
        self.differing *= left
        self.cuts *= left
        self.whole *= left
        self.through *= left

    def behind(self, stretch: float, judged: float, rest: float) -> Behind:
        """What to expect behind a cut.

        Args:
            stretch: tokens to the end of the first rejected prefix.
            judged: tokens that were judged behind the cut.
            rest: tokens to where the target ends its segment.
        """
        rate = self.differing + DIFFERING_WEIGHT * DIFFERING
        rate /= self.kept + DIFFERING_WEIGHT
        whole = self.whole / (self.cuts + CUTS_WEIGHT)
        through = self.through + CUTS_WEIGHT * THROUGH
        through *= stretch / (self.cuts - self.whole + CUTS_WEIGHT)

        def agreed(most: float) -> float:
            """Tokens until the target chooses another, of so many."""
            return (1 - math.exp(-rate * most)) / rate

        reach = agreed(judged)
        matched = whole * reach + (1 - whole) * agreed(through)
        spared = whole * agreed(min(judged, rest)) + (1 - whole) * agreed(min(through, rest))
        return Behind(matched, rest - spared, reach)
