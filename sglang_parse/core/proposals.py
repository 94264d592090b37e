"""How many tokens of a head's proposals are accepted, by their length.

Where a proposal ends decides where the next one begins. A text that repeats itself, as records do,
suits one length much better than its neighbors, so each length has its own mean. One that was not
proposed of late has that of its places in longer and shorter ones. Numbers only.
"""

from __future__ import annotations

from sglang_parse.core.round import Round

HOPE, WEIGHT = 1.05, 8
"""What a length that was not proposed of late may bring, over the mean of its places, so that it is
tried; and the proposals that this counts as."""


class ProposalAcceptance:
    """Decayed counts of verified proposals; ``error_rate``: errors per token before the first one.

    >>> acceptance = ProposalAcceptance(longest=3, error_rate=0.1)
    >>> [round(acceptance.expect(length), 2) for length in (1, 2, 3)]
    [1.99, 2.85, 3.61]
    """

    def __init__(self, longest: int, error_rate: float) -> None:
        self._first = 1 - error_rate
        # Tokens at each place that were accepted behind accepted ones, and all; output tokens of
        # the passes with each length, and the passes.
        self._counts = [[0.0] * longest for _ in range(4)]

    def observe(self, one: Round, memory: float) -> None:
        """Records a proposal, one of about ``memory`` that count."""
        self._counts = [[(1 - 1 / memory) * x for x in some] for some in self._counts]
        accepted, reached, output, passes = self._counts
        length = min(one.num_verified, len(passes))
        for place in range(min(length, one.num_output + 1)):
            accepted[place] += place < one.num_output
            reached[place] += 1
        if length:
            output[length - 1] += 1 + one.num_output
            passes[length - 1] += 1

    def expect(self, length: int) -> float:
        """Returns mean output tokens of a pass with a proposal of ``length``."""
        mean, reach, chance = 1.0, 1.0, self._first
        accepted, reached, output, passes = self._counts
        for num_accepted, num_reached in zip(accepted[:length], reached[:length], strict=True):
            chance = (chance + num_accepted) / (1 + num_reached)
            reach *= chance
            mean += reach
        return (WEIGHT * HOPE * mean + output[length - 1]) / (WEIGHT + passes[length - 1])
