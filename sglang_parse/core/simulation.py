"""Simulated acceptance for benchmarks: accepts a configured fraction of each draft.

Models with dummy weights have realistic speed but meaningless verdicts. With simulated acceptance
the verify pass runs as usual, and only its verdicts are ignored. No tokens are matched after the
accepted prefix, and draft length does not adapt, because the acceptance ratio does not depend on
it. Similar to SGLang's ``SGLANG_SIMULATE_ACC_LEN``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from sglang_parse.core.config import ParseConfig, flag
from sglang_parse.core.setting import ConfigError

ENV_VAR = "SGLANG_PARSE_SIMULATE_ACCEPTANCE"
"""Fraction of draft tokens to accept, 0 to 1; unset or empty to use the verdicts."""


class SimulatedAcceptance:
    """Accepts ``fraction`` of all draft tokens on average.

    Deterministic: the rounding error of one draft carries over to the next.
    """

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction
        self._error = 0.0

    @classmethod
    def from_env(
        cls, config: ParseConfig, environ: Mapping[str, str] = os.environ
    ) -> SimulatedAcceptance | None:
        """Reads ``ENV_VAR``; None if it is not set.

        Raises:
            ConfigError: the value is not in [0, 1], or verification is token by token.
        """
        text = environ.get(ENV_VAR, "")
        if not text:
            return None
        try:
            fraction = float(text)
        except ValueError:
            fraction = float("nan")
        if not 0 <= fraction <= 1:
            raise ConfigError(
                f"{ENV_VAR} is {text!r}; use a number from 0 (accept nothing) to 1 (accept all), "
                "or unset it to use the verdicts"
            )
        if not config.is_semantic:
            setting = flag("verification")
            raise ConfigError(
                f"{ENV_VAR} is {text!r}, but {setting} {config.verification} guarantees the plain "
                f"target's output; unset it, or use {setting} semantic"
            )
        return cls(fraction)

    def accepted_len(self, num_drafted: int, prefix_ends: Sequence[int]) -> int:
        """Returns the number of accepted tokens: the end of a verified prefix, or 0.

        Args:
            num_drafted: draft tokens.
            prefix_ends: ascending draft offsets.
        """
        wanted = self.fraction * num_drafted + self._error
        accepted_len = min((0, *prefix_ends), key=lambda end: abs(end - wanted))
        # A draft without a long enough prefix must not make up for it in many others.
        self._error = min(max(wanted - accepted_len, -num_drafted), num_drafted)
        return accepted_len
