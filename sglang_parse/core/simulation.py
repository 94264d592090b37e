"""Simulated acceptance for benchmarks: of a fraction of each draft, or up to drawn refusals, which
the draft model may doubt; and of a parallel draft's candidates.

Models with dummy weights have realistic speed but meaningless verdicts. With simulated acceptance
the verify pass runs as usual, and only its verdicts are ignored. No tokens are matched after the
accepted prefix. Similar to SGLang's ``SGLANG_SIMULATE_ACC_LEN``.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from random import Random

from sglang_parse.core.block import MAX_BLOCK
from sglang_parse.core.config import ParseConfig, flag
from sglang_parse.core.doubt import LEVELS, own_chance
from sglang_parse.core.setting import ConfigError

ENV_VAR = "SGLANG_PARSE_SIMULATE_ACCEPTANCE"
"""Fraction of draft tokens to accept, 0 to 1, or ``every:N`` (``every:N:SEED``) for a refusal every
N tokens on average, or ``doubt:N`` for the same ones where the draft model is unsure; unset or
empty to use the verdicts."""
CYCLE = 1 << 16
"""Places of a text for which refusals are drawn; they repeat."""
NUM_HASHED = 64
"""Tokens at a prompt's end that tell its text from others."""
BLOCK_ENV_VAR = "SGLANG_PARSE_SIMULATE_BLOCK"
"""Tokens that a block of a parallel draft adds on average, while it has as many candidates: 1 to
``MAX_BLOCK``; unset or empty to accept the candidates that the draft model confirms."""


def block_tokens(environ: Mapping[str, str] = os.environ) -> float | None:
    """Reads ``BLOCK_ENV_VAR``; None if it is not set.

    Raises:
        ConfigError: the value is not in that range.
    """
    text = environ.get(BLOCK_ENV_VAR, "")
    number = _number(text) if text else None
    if number is not None and not 1 <= number <= MAX_BLOCK:
        raise ConfigError(
            f"{BLOCK_ENV_VAR} is {text!r}; use a number from 1 to {MAX_BLOCK}, or unset it to "
            "accept what the draft model confirms"
        )
    return number


class SimulatedAcceptance:
    """Accepts ``fraction`` of all draft tokens on average.

    Deterministic: the rounding error of one draft carries over to the next. The ratio is the same
    for every length of drafts, so the length must not be chosen by it.

    Attributes:
        adapts_len: whether longer drafts are accepted less, as real ones are: tokens are refused.
        unsure: places of tokens that the draft model doubts; empty if its probabilities count.
    """

    def __init__(
        self, fraction: float, refused: Sequence[int] = (), unsure: Sequence[int] = ()
    ) -> None:
        self.fraction, self.adapts_len, self.unsure = fraction, bool(refused), frozenset(unsure)
        self._refused = [*refused, *(place + CYCLE for place in refused[:1])]
        self._error = 0.0

    @classmethod
    def refusals(
        cls, every: float, seed: int = 0, *, in_doubt: bool = False
    ) -> SimulatedAcceptance:
        """Refuses each token with probability 1 / ``every`` and accepts the longest prefix before
        the first refused one.

        A refusal belongs to a place of a request's text: drafts of any length, in any order, with
        any number of requests beside them, meet the same ones.

        Args:
            in_doubt: the draft model gives refused tokens the lowest level (``core.doubt``), and so
                many others that this level's own chance is right; it is sure of the rest.
        """
        drawn = Random(seed)
        draws = [drawn.random() * every for _ in range(CYCLE)]
        refused = [place for place, draw in enumerate(draws) if draw < 1] or [0]
        most = 1 / (1 - own_chance(0))
        unsure = [place for place, draw in enumerate(draws) if draw < most] or refused
        return cls(1 - 1 / every, refused, unsure if in_doubt else ())

    @classmethod
    def from_env(
        cls, config: ParseConfig, environ: Mapping[str, str] = os.environ
    ) -> SimulatedAcceptance | None:
        """Reads ``ENV_VAR``; None if it is not set.

        Raises:
            ConfigError: the value is none of these, or verification is token by token.
        """
        text = environ.get(ENV_VAR, "")
        if not text:
            return None
        every = re.fullmatch(r"(every|doubt):([^:]*)(?::(\d+))?", text)
        number = _number(every[2] if every else text)
        if not (1 <= number < CYCLE if every else 0 <= number <= 1):
            raise ConfigError(
                f"{ENV_VAR} is {text!r}; use a number from 0 (accept nothing) to 1 (accept all), "
                f"every:N for a refusal every N tokens (1 to {CYCLE - 1}), doubt:N where the draft "
                "model is unsure of them, every:N:SEED to draw others, or unset it to use the "
                "verdicts"
            )
        if not config.is_semantic:
            setting = flag("verification")
            raise ConfigError(
                f"{ENV_VAR} is {text!r}, but {setting} {config.verification} guarantees the plain "
                f"target's output; unset it, or use {setting} semantic"
            )
        if not every:
            return cls(number)
        return cls.refusals(number, int(every[3] or 0), in_doubt=every[1] == "doubt")

    def accepted_len(self, num_drafted: int, prefix_ends: Sequence[int], place: int = 0) -> int:
        """Returns the number of accepted tokens: the end of a verified prefix, or 0.

        Args:
            prefix_ends: ascending draft offsets.
            place: of the draft's first token, see ``place_of``.
        """
        if self.adapts_len:
            start = place % CYCLE
            num_clean = self._refused[bisect_left(self._refused, start)] - start
            return max((0, *(end for end in prefix_ends if end <= num_clean)))
        wanted = self.fraction * num_drafted + self._error
        accepted_len = min((0, *prefix_ends), key=lambda end: abs(end - wanted))
        # A draft without a long enough prefix must not make up for it in many others.
        self._error = min(max(wanted - accepted_len, -num_drafted), num_drafted)
        return accepted_len

    def levels(self, place: int, known: Sequence[int]) -> Sequence[int]:
        """Levels of draft tokens from ``place`` on; the draft model's, ``known``, if they count."""
        if not self.unsure:
            return known
        places = range(place, place + len(known))
        return [0 if one % CYCLE in self.unsure else LEVELS - 1 for one in places]

    def __str__(self) -> str:
        ratio = f"{100 * self.fraction:.3g} %"
        return f"{ratio} of tokens, up to a refusal," if self.adapts_len else f"{ratio} of drafts"


def place_of(prompt_ids: Sequence[int], num_output: int) -> int:
    """Place in a request's text; where the text starts depends on its prompt, in every process."""
    return hash((len(prompt_ids), *prompt_ids[-NUM_HASHED:])) + num_output


def _number(text: str) -> float:
    """NaN, which is in no range, for other text."""
    try:
        return float(text)
    except ValueError:
        return float("nan")
