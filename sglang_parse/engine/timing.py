"""Stage times: the one clock of a server's iterations, and what it charges to requests."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sglang_parse.core.phases import Action, Stage, StageTime
from sglang_parse.engine.drafting.chunk import DraftChunk
from sglang_parse.engine.sglang_types import Req
from sglang_parse.engine.verify import TargetForward, TargetResult


class Stopwatch:
    """Wall time of one stage, also as a context manager.

    A stage that was launched while an earlier one ran counts from when the host had that one's
    results: its wait is not its cost.

    Attributes:
        ms: wall time, once stopped.
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

    def sync(self) -> float:
        """The host has a stage's results; returns the time in seconds."""
        self.synced_at = time.perf_counter()
        return self.synced_at

    def end_iteration(self) -> float:
        self._idle_since = self.sync()
        return self.synced_at

    def end_idle(self) -> float | None:
        """Time in ms since the last iteration; None if a prefill ran since."""
        since, self._idle_since = self._idle_since, None
        return None if since is None else (time.perf_counter() - since) * 1e3


class IterationTimes:
    """Stage times of one iteration.

    Attributes:
        stages: what the controller observes.
    """

    def __init__(self) -> None:
        self.stages: list[StageTime] = []
        self._propose_ms = 0.0

    def scheduler(self, num_reqs: int, ms: float | None) -> None:
        """Time between iterations, where nothing runs meanwhile."""
        if ms is not None:
            self.stages.append(StageTime(Stage.SCHEDULER, num_reqs, 0, ms))

    def draft_prefill(self, reqs: Sequence[Req], num_prefilled: Sequence[int], ms: float) -> None:
        """Time of a draft prefill of ``num_prefilled`` tokens per request."""
        total = sum(num_prefilled)
        for req, count in zip(reqs, num_prefilled, strict=True):
            req.parse_state.charge(draft=ms * count / total)
        self.stages.append(StageTime(Stage.DRAFT_PREFILL, total, 0, ms))

    def draft(self, reqs: Sequence[Req], chunk: DraftChunk, ms: float) -> None:
        for req in reqs:
            req.parse_state.charge(draft=ms / len(reqs))
        sizes = len(reqs), chunk.tokens_per_request
        self.stages.append(StageTime(Stage.DRAFT, *sizes, ms, chunk.num_forwards, chunk.layout))

    def propose(self, reqs: Sequence[Req], ms: float) -> None:
        """Time of an EAGLE-3 proposal, a part of the target forward's."""
        self._propose_ms = ms
        for req in reqs:
            req.parse_state.charge(decode=ms / len(reqs))

    def target(
        self,
        reqs: Sequence[Req],
        forward: TargetForward,
        results: Sequence[TargetResult],
        num_decoded: int,
        ms: float,
    ) -> None:
        """Time of a target forward, charged to its requests by their rows.

        Args:
            num_decoded: tokens that decode rows and proposals output.
        """
        ms_per_row = max(0.0, ms - self._propose_ms) / forward.num_rows
        for result in results:
            stage = "verify" if result.action is Action.VERIFY else "decode"
            reqs[result.row].parse_state.charge(**{stage: ms_per_row * result.num_rows})
        num_decoding = sum(result.action is not Action.VERIFY for result in results)
        if num_decoding < len(results):
            self.stages.append(StageTime(Stage.VERIFY, forward.num_rows, 0, ms))
        else:
            self.stages.append(StageTime(Stage.DECODE, num_decoding, num_decoded, ms))
