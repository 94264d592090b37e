"""What drafts of texts may lose: one budget per request, for all of its texts together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Budget:
    """One request's, in tokens.

    Attributes:
        max_loss, rate: what may be lost at first, and per output token.
        max_gain: of what was gained, what may be lost again.
        net_loss: costs of verify passes less output draft tokens.
    """

    max_loss: float
    rate: float
    max_gain: float
    net_loss: float = 0.0

    def left(self, num_written: int) -> float:
        """What may still be lost, after so many output tokens."""
        return self.max_loss + self.rate * num_written - self.net_loss

    def lose(self, cost: float) -> None:
        self.net_loss = max(-self.max_gain, self.net_loss + cost)
