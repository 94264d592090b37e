"""KV slots that requests hold beyond their committed tokens, as a server logs them.

``patches/kv_log.py`` writes one JSON list of held slots per iteration into the file that the
environment variable ``KV_LOG`` names.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

KV_LOG = "SGLANG_PARSE_KV_LOG"


@dataclass(frozen=True, slots=True)
class Held:
    """KV slots one request holds beyond its committed tokens.

    Attributes:
        mean, peak: slots, over all requests and iterations.
        iterations: how many were logged.
        tokens_per_s: output tokens per second of the load.
    """

    mean: float
    peak: int
    iterations: int
    tokens_per_s: float

    @classmethod
    def of(cls, lines: Iterable[str], tokens_per_s: float) -> Held:
        """From the lines of a log.

        Raises:
            ValueError: nothing was logged.
        """
        iterations = [json.loads(line) for line in lines]
        held = [slots for iteration in iterations for slots in iteration]
        if not held:
            raise ValueError("the server logged no iteration: was the plugin loaded?")
        return cls(round(statistics.fmean(held), 1), max(held), len(iterations), tokens_per_s)
