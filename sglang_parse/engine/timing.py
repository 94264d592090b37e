"""Stage timer: the one clock of a server's iterations."""

from __future__ import annotations

import time


class Stopwatch:
    """Wall time of one stage, also as a context manager.

    A stage that was launched while an earlier one ran counts from when the host had that one's
    results: its wait is not its cost.

    Attributes:
        ms: wall time in ms, once stopped.
    """

    def __init__(self, timer: StageTimer) -> None:
        self._timer, self._started, self.ms = timer, time.perf_counter(), 0.0

    def stop(self) -> float:
        self.ms = (time.perf_counter() - max(self._started, self._timer.synced_at)) * 1e3
        return self.ms

    def __enter__(self) -> Stopwatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class StageTimer:
    """Times the stages of one server.

    Attributes:
        synced_at: ``time.perf_counter`` when the host last had a stage's results.
    """

    def __init__(self) -> None:
        self.synced_at = 0.0
        self._idle_since: float | None = None

    def start(self) -> Stopwatch:
        return Stopwatch(self)

    def sync(self) -> None:
        """The host has a stage's results."""
        self.synced_at = time.perf_counter()

    def end_iteration(self) -> float:
        """The host has all results of an iteration; returns the time in seconds."""
        self.synced_at = self._idle_since = time.perf_counter()
        return self.synced_at

    def scheduler_ms(self) -> float | None:
        """Time in ms since the last iteration; None if something else ran in between."""
        since, self._idle_since = self._idle_since, None
        return None if since is None else (time.perf_counter() - since) * 1e3

    def prefill_ran(self) -> None:
        """The time until the next iteration is not the scheduler's alone."""
        self._idle_since = None
