"""Length of a draft that copies from the prompt, or from the output so far.

A copy may end at every token, the sooner the fewer tokens it has been right for. Costs are in
tokens that decode steps output at the present load.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from sglang_parse.core.loss import Budget
from sglang_parse.core.policy.texts import TextLength
from sglang_parse.core.prompt_match import KNOWN
from sglang_parse.core.round import Round

MATCHES = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 97, 193)
CHANCES = (0.22, 0.42, 0.53, 0.62, 0.69, 0.75, 0.81, 0.86, 0.90, 0.92, 0.94, 0.98, 0.985, 0.99)
"""Chance that a copy goes on, where so many tokens match at least: of 2,814 answers of 26 models,
much alike in 18 kinds of work."""
BESIDE_PREDICTION = 0.14
"""Of the first one where a prediction does not fit: the prompt is much like it."""
GROUPS = (0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3)
"""Of MATCHES: one request's copies are better, or worse, than others' in all of a group alike."""
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MAX_CHANCE = 0.995
SURE = 6
"""Matching tokens from which on a copy is hardly right by chance."""
MIN_REACH = 0.02
"""Chance of a draft's last token from which on longer drafts are not looked at."""
MIN_SPEEDUP = 1.05
"""Expected, over what else would happen."""
PRIOR, MEMORY = 25, 500
"""Tokens that the server's chances count as before the first one, and at most."""
OWN_WEIGHT, OWN_KEEP = 12.0, 0.97
"""Tokens of the server's chances that a request's own are mixed with; what is kept of the latter
with each more."""


class CopyStats:
    """What a server has learned: by match, the chance that a copy goes on.

    Args:
        first: of a match of one token, before the first one.
    """

    def __init__(self, first: float = CHANCES[0]) -> None:
        self.chances, self._counts = [first, *CHANCES[1:]], [PRIOR] * len(CHANCES)

    def chance(self, match_len: int) -> float:
        return self.chances[_index(match_len)]

    def see(self, match_len: int, *, goes_on: bool) -> None:
        """Records a token."""
        match = _index(match_len)
        self._counts[match] = count = min(MEMORY, self._counts[match] + 1)
        self.chances[match] += (goes_on - self.chances[match]) / count


class CopyLength(TextLength):
    """Chooses the lengths of one request's copies.

    Args:
        stats: what the server knows.
        budget: of the request, for all of its texts.
        probe_tokens: where nothing is timed, or drafts are asked for, the shortest length of known
            places: constants choose, alike in every run; 0 where expectations do.
    """

    def __init__(self, stats: CopyStats, budget: Budget, probe_tokens: int = 0) -> None:
        self.net_loss, self._budget, self._stats = 0.0, budget, stats
        self._probe_tokens = probe_tokens
        self._waited = 0.0  # the last charge for a step that waited
        self._hits, self._expected = [0.0] * 4, [0.0] * 4  # by group, of this request

    def choose(
        self,
        match_len: int,
        limit: int,
        num_written: int,
        extra_cost: Callable[[int], float],
        ends: Sequence[int] = (),
        rival: float = 1.0,
    ) -> int:
        """See ``TextLength.choose``; copies have no segments: every token is verified."""
        del ends
        if self._probe_tokens:
            return min(limit, max(self._probe_tokens, 2 * match_len)) if match_len >= KNOWN else 0
        left, chances = self.left(num_written), self._chances()
        best, best_speed = 0, MIN_SPEEDUP * rival
        num, reach, mean = 0, 1.0, 0.0
        for length in LENGTHS:
            num_more = min(length, limit) - num
            cost = extra_cost(num + num_more)
            if num_more <= 0 or reach < MIN_REACH or cost > left:
                break
            for match in range(match_len + num, match_len + num + num_more):
                reach *= chances[_index(match)]
                mean += reach
            num += num_more
            if (1 + mean) / (1 + cost) > best_speed:
                best, best_speed = num, (1 + mean) / (1 + cost)
        return best

    def _chances(self) -> list[float]:
        """By match, corrected by how many of this request's copies went on."""
        own = [
            (OWN_WEIGHT + hits) / (OWN_WEIGHT + expected)
            for hits, expected in zip(self._hits, self._expected, strict=True)
        ]
        both = zip(self._stats.chances, GROUPS, strict=True)
        return [min(MAX_CHANCE, chance * own[group]) for chance, group in both]

    def lose(self, cost: float) -> None:
        self._waited = cost or self._waited
        super().lose(cost)

    def refund(self, match_len: int) -> None:
        """The copy's next token was decoded, and the step that waited for it was right to. No more
        than that wait, since every answer has copies that are right by chance; but what a draft of
        a sure one would have brought: a pass may cost more than can be lost at first."""
        if match_len >= SURE:
            super().lose(-1)
        elif match_len > 1:
            super().lose(-self._waited)
            self._waited = 0.0

    def watch(self, match_len: int, *, fits: bool) -> None:
        """Records whether the copy's next token was output, drafted or not."""
        group, expected = GROUPS[_index(match_len)], max(0.05, self._stats.chance(match_len))
        self._stats.see(match_len, goes_on=fits)
        self._hits[group] = OWN_KEEP * self._hits[group] + fits
        self._expected[group] = OWN_KEEP * self._expected[group] + expected

    def observe(self, match_len: int, one: Round, cost: float) -> None:
        for match in range(match_len, match_len + one.num_output):
            self.watch(match, fits=True)
        if one.num_output < one.num_verified:
            self.watch(match_len + one.num_output, fits=False)
        super().lose(cost - one.num_output)


def _index(match_len: int) -> int:
    return max(0, bisect_right(MATCHES, match_len) - 1)
