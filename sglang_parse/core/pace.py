"""How slow forwards are now: other programs on the machine, or heat, slow all of them down."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Pace:
    """One for all stages whose times are compared. Their means are those of pace 1, so that a size
    that was not seen since gets slower and faster with the others.

    Attributes:
        factor: times that forwards take, over their means.
        last: the last forward's time over the expected one.
    """

    factor: float = 1.0
    last: float = 1.0

    def see(self, ms: float, expected: float) -> None:
        """Records a forward. One may be a mistake; of two, half of the difference may be their
        own."""
        change = ms / expected if ms and expected else 1.0
        self.factor *= sorted((1.0, self.last, change))[1] ** 0.5
        self.last = change
