"""Forwards and waits of a host on a GPU without numbers (``fake_gpu``).

A wait drains the device if no forward was launched after what the host waits for.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


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


class Operations(TorchDispatchMode):
    """The names of PyTorch's operations while it lasts, those that only make views included."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))
