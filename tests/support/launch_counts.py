"""Forwards and waits of a host on a GPU without numbers (``fake_gpu``).

A wait drains the device if no forward was launched after what the host waits for.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Launches:
    """Counts.

    Attributes:
        forwards: forwards by mode.
        waits: waits of the host for numbers.
        drains: waits during which the device ran out of forwards.
    """

    forwards: Counter[str] = field(default_factory=Counter)
    waits: int = 0
    drains: int = 0

    def during(self, call: Callable[[], Any]) -> Launches:
        """Returns what ``call`` adds."""
        before = copy.deepcopy(self)
        call()
        return Launches(
            self.forwards - before.forwards, self.waits - before.waits, self.drains - before.drains
        )

    @property
    def num_forwards(self) -> int:
        return self.forwards.total()

    def wait(self, num_forwards: int) -> None:
        """Counts a wait for what was copied after so many forwards."""
        self.waits += 1
        self.drains += num_forwards == self.num_forwards
