"""The overlap schedule: what is under way on the device while the scheduler works.

SGLang launches an iteration before it processes the result of the one before:

    scheduler   plan n, launch n | process n - 1 | plan n + 1, launch n + 1 | process n | ...
    device                       [ iteration n ..................... ]      [ iteration n + 1 ...

An iteration's numbers stay on the device until somebody needs them. That is the plan of the next
iteration, whose shape follows from drafts and verdicts: it reads them first. But after plain steps
of the target alone the next step needs their tokens only on the device: it is launched unread, and
the tokens reach the host while it runs, when SGLang processes their result. A request whose
segment such a token ended has then been given a step too many: what it wrote is dropped, so that
answers do not depend on the schedule.

Without overlap every iteration is read at once, and none of this shows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch


class Underway(Protocol):
    """An iteration that has been launched (``iteration.Iteration``)."""

    def settle(self) -> None:
        """Read it: requests move on, its result is filled."""

    def may_be_followed_unread(self, reqs: Sequence[Any]) -> bool:
        """Whether the next iteration, of these requests, can be planned without its numbers."""

    def last_tokens(self, reqs: Sequence[Any]) -> torch.Tensor:
        """int64 [len(reqs)], on the device: what it wrote for them."""


class Pipeline:
    """The iterations under way in this process, the oldest first: one, for a moment two.

    Attributes:
        forward_stream: where the worker's forwards run; None before the first.
        last_read: ``time.perf_counter`` when the last iteration had been read.
    """

    def __init__(self) -> None:
        self.forward_stream: Any = None
        self.last_read = 0.0
        self._underway: deque[Underway] = deque()

    def add(self, iteration: Underway) -> None:
        self._underway.append(iteration)

    def settle(self, iteration: Underway | None = None) -> None:
        """Read what is under way, in order: up to ``iteration``, or all of it."""
        if iteration is not None and iteration not in self._underway:
            return
        while self._underway:
            oldest = self._underway.popleft()
            oldest.settle()
            if oldest is iteration:
                return

    def before_planning(self, reqs: Sequence[Any]) -> None:
        """Read what the plan of the next iteration, of ``reqs``, has to know."""
        while len(self._underway) > 1:
            self.settle(self._underway[0])
        if self._underway and not self._underway[0].may_be_followed_unread(reqs):
            self.settle()

    def unread_tokens(self, reqs: Sequence[Any]) -> torch.Tensor | None:
        """int64 [len(reqs)], on the device: their last tokens, or None where the host has them."""
        if not self._underway or not any(req.parse_state.num_unread for req in reqs):
            return None
        return self._underway[-1].last_tokens(reqs)

    def order_behind_forward(self, device: Any) -> None:
        """Whatever is launched from here on runs after the forwards that are under way."""
        if self.forward_stream is not None:
            torch.get_device_module(device).current_stream().wait_stream(self.forward_stream)


@lru_cache(maxsize=1)
def pipeline() -> Pipeline:
    """This process's."""
    return Pipeline()
