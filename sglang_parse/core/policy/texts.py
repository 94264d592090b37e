"""Length of a draft from a text: a prediction, an earlier answer, another server's draft.

It costs its verify pass and nothing else. Costs are in tokens that decode steps output at the
present load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_parse.core.loss import Budget
from sglang_parse.core.policy.constants import PolicyConfig
from sglang_parse.core.policy.drafting import Acceptance
from sglang_parse.core.round import Round
from sglang_parse.core.segment import whole_segments

KNOWN_WELL = 4
"""Newest tokens from which on more of them do not tell better where an answer is in a text."""


class TextSourceStats:
    """What a server has learned about drafts of one source. ``match_len`` newest tokens were found
    in the text; 0 where the answer follows it."""

    def __init__(self, config: PolicyConfig) -> None:
        self.config, self.acceptance = config, Acceptance(config.error_rate)
        self._hits: dict[int, float] = {}

    def hit(self, match_len: int) -> float:
        """Chance that the first token is output; before the first draft as likely as not, and more
        where the answer follows the text."""
        return self._hits.get(min(match_len, KNOWN_WELL), 0.5 if match_len else 0.75)

    def expect(self, match_len: int, draft_tokens: int) -> float:
        """Mean output tokens of a draft."""
        return self.hit(match_len) * self.acceptance.expect(draft_tokens)[1]

    def watch(self, match_len: int, *, fits: bool) -> None:
        """Records whether the text's next token was output."""
        hit = self.hit(match_len)
        self._hits[min(match_len, KNOWN_WELL)] = hit + self.config.mean_weight * (fits - hit)

    def observe(self, one: Round) -> None:
        """Records the rest of a verified draft."""
        if one.num_output:
            self.acceptance.observe(one, self.config.memory)


class TextLength:
    """Chooses the lengths of one request's drafts from one text. A text that never fits costs a
    small part of the answer, whatever was learned from others; and one that fits drafts: each
    request tries what is known well until it fails. What others' drafts brought counts half with
    each of its own that brings nothing. A decoded token, too, tells whether a draft would have
    fitted.

    Args:
        source: what the server knows about such texts.
        budget: of the request, for all of its texts.

    Attributes:
        longest: most tokens of the next draft: four times the last one's if all of it fitted.
        net_loss: costs of verify passes less output draft tokens.
    """

    def __init__(self, source: TextSourceStats, budget: Budget) -> None:
        self._source, self._config, self._budget = source, source.config, budget
        self.net_loss, self.longest = 0.0, self._config.probe_tokens
        self._misses: dict[int, int] = {}  # in a row, by how well the place was known
        self._drafted: set[int] = set()

    def choose(
        self,
        match_len: int,
        limit: int,
        num_written: int,
        extra_cost: Callable[[int], float],
        ends: Sequence[int] = (),
        rival: float = 1.0,
    ) -> int:
        """Returns the draft tokens that are worth verifying, 0 for none.

        Args:
            match_len: see ``TextSourceStats``.
            limit: tokens that there are, or that are allowed.
            num_written: output tokens so far.
            extra_cost: cost of verifying that many draft tokens, beyond a decode step.
            ends: where segments end among the next ``2 * longest`` tokens, ascending; none where
                every token is verified.
            rival: tokens that another source's drafts bring in the time of a decoded one: a draft
                has to bring more, but for the first, which tells whether the text fits.
        """
        if not limit or (left := self.left(num_written)) <= 0:
            return 0
        lengths = {whole_segments(max(1, min(limit, self.longest) >> i), ends) for i in range(4)}
        costs = {n: cost for n in lengths if (cost := extra_cost(n)) <= left}
        place = min(match_len, KNOWN_WELL)
        expect, share = self._source.expect, 0.5 ** self._misses.get(place, 0)
        gains = {n: share * expect(place, n) + 1 - rival * (1 + costs[n]) for n in costs}
        best = max(gains, key=lambda length: gains[length], default=0)
        if best and gains[best] >= self._config.text_min_gain:
            return best
        if place not in (0, KNOWN_WELL) or share < 1 or (rival > 1 and place in self._drafted):
            return 0
        # Only a draft tells whether it fits, and only a pass what a pass costs.
        return min(costs, default=0 if match_len or self._drafted else min(lengths))

    def left(self, num_written: int) -> float:
        """Tokens that the request may still lose."""
        return self._budget.left(num_written)

    def lose(self, cost: float) -> None:
        """Records a cost without a draft; below 0, what a draft would have brought."""
        self.net_loss = max(-self._budget.max_gain, self.net_loss + cost)
        self._budget.lose(cost)

    def refund(self, match_len: int) -> None:
        """The text's next token was decoded. Where its place is known well, as much as a draft of
        it would have brought may be lost: a text that was given up is tried again."""
        self.lose(-1 if match_len >= KNOWN_WELL else 0)

    def watch(self, match_len: int, *, fits: bool) -> None:
        """Records whether the text's next token was output, drafted or not."""
        place = min(match_len, KNOWN_WELL)
        self._misses[place] = 0 if fits else 1 + self._misses.get(place, 0)
        self._source.watch(match_len, fits=fits)

    def observe(self, match_len: int, one: Round, cost: float) -> None:
        """Records a verified draft and its cost beyond a decode step."""
        self.watch(match_len, fits=one.num_output > 0)
        self._drafted.add(min(match_len, KNOWN_WELL))
        self._source.observe(one)
        self.lose(cost - one.num_output)
        fits = one.num_output == one.num_verified
        least, longest = self._config.probe_tokens, self.longest
        self.longest = max(longest, 4 * one.num_output) if fits else max(least, longest // 2)
