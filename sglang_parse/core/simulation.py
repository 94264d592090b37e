"""Simulated acceptance, for benchmarks: drafts are cut at a wanted share, whatever the verdicts.

Models without trained weights have their real sizes and meaningless verdicts. The pass, its
questions and their readout stay as they are, so the time is real; only the place of the cut is not.
Behind it the target writes alone, whatever the draft has there: a share is all that is kept.
The length of drafts is as the settings say: a share of any length would make long ones always best.
In the spirit of SGLang's ``SGLANG_SIMULATE_ACC_LEN``. Pure.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from sglang_parse.core.config import ConfigError, ParseConfig, flag

ENV_VAR = "SGLANG_PARSE_SIMULATE_ACCEPTANCE"
"""Share of each draft to accept, 0 to 1; where it is unset or empty the verdicts decide."""


class SimulatedAcceptance:
    """Cuts drafts so that ``fraction`` of all draft tokens are kept on average.

    Deterministic: what a cut kept too much or too little is made up for by the next ones.
    """

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction
        self._owed = 0.0

    @classmethod
    def from_env(
        cls, config: ParseConfig, environ: Mapping[str, str] = os.environ
    ) -> SimulatedAcceptance | None:
        """What the environment asks for; None where it asks for nothing.

        Raises:
            ConfigError: it is no share, or the server's mode has to be exact.
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
                f"{ENV_VAR} is {text!r}; use a number from 0 (keep nothing of a draft) to 1 (keep "
                "all of it), or unset it to let the verdicts decide"
            )
        if not config.is_semantic:
            setting = flag("verification")
            raise ConfigError(
                f"{ENV_VAR} is {text!r} while {setting} is {config.verification!r}, which promises "
                f"the plain target's output; unset it, or use {setting} semantic"
            )
        return cls(fraction)

    def accepted_len(self, num_drafted: int, prefix_ends: Sequence[int]) -> int:
        """How many draft tokens are kept: the end of a prefix, or 0.

        Args:
            num_drafted: tokens of the draft.
            prefix_ends: ascending draft offsets, as judged in the pass.
        """
        wanted = self.fraction * num_drafted + self._owed
        cut = min((0, *prefix_ends), key=lambda end: abs(end - wanted))
        # A draft may have no prefix long enough: nobody makes up for that.
        self._owed = min(max(wanted - cut, -num_drafted), num_drafted)
        return cut
