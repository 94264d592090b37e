"""Stage times: the one clock of a server's iterations, and what it charges to requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sglang_parse.core.phases import Action
from sglang_parse.core.request import RequestState
from sglang_parse.core.stage import Stage, StageTime
from sglang_parse.device import DeviceClock
from sglang_parse.engine.drafting.chunk import DraftChunk
from sglang_parse.engine.sglang_types import Req
from sglang_parse.engine.verify import TargetForward


class Stopwatch:
    """Device time of one stage, in one part or several, each also as a context manager.

    Where the device waits for the host within a part, that is its cost, too.
    """

    def __init__(self, timer: StageTimer) -> None:
        self._timer, self._parts = timer, list[tuple[Any, Any]]()
        self._start: Any = None

    def start(self, at: Any = None) -> Stopwatch:
        """Begins a part at the mark ``at``, or with what is launched next."""
        self._start = self._timer.clock.mark() if at is None else at
        return self

    def stop(self, end: Any = None) -> None:
        """Ends a part at the mark ``end``, or with what was launched last."""
        self._timer.last_end = self._timer.clock.mark() if end is None else end
        self._parts.append((self._start, self._timer.last_end))

    @property
    def ms(self) -> float | None:
        """Time of all parts; None until the device has passed them."""
        times = [self._timer.clock.ms(*part) for part in self._parts]
        return None if None in times else sum(filter(None, times))

    def __enter__(self) -> Stopwatch:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class StageTimer:
    """Times the stages of one server.

    A time is read when the device has passed its end: of what the host waits for at once, of the
    rest in a later iteration.

    Attributes:
        last_end: mark of the last stage's end; None if a prefill ran since.
    """

    def __init__(self, device: Any) -> None:
        self.clock, self.last_end = DeviceClock(device), None
        self._unread: list[tuple[Sequence[Stopwatch], Callable[..., None]]] = []
        self._stages: list[StageTime] = []
        self._prefills: list[tuple[float, int, float]] = []

    def watch(self) -> Stopwatch:
        return Stopwatch(self)

    def start(self) -> Stopwatch:
        return self.watch().start()

    def when_passed(self, record: Callable[..., None], *watches: Stopwatch) -> None:
        """Calls ``record`` with the times in ms as soon as all are known."""
        self._unread.append((watches, record))
        self._record_passed()

    def take_stages(self) -> list[StageTime]:
        self._record_passed()
        stages, self._stages = self._stages, []
        return stages

    def _record_passed(self) -> None:
        unread, self._unread = self._unread, []
        for watches, record in unread:
            times = [watch.ms for watch in watches]
            if None in times:
                self._unread.append((watches, record))
            else:
                record(*times)

    def _add(self, stage: StageTime, watch: Stopwatch) -> None:
        """A stage, when its time is known."""
        self.when_passed(lambda ms: self._stages.append(replace(stage, ms=ms)), watch)

    # -- stages -----------------------------------------------------------------

    def prefill(
        self, watch: Stopwatch, head: Stopwatch, reqs: Sequence[Req], num_head_tokens: int
    ) -> None:
        """A prefill of the target; ``head``: of ``num_head_tokens`` by an EAGLE-3 head."""
        states = [req.parse_state for req in reqs]
        drafting = sum(not state.policy.is_plain for state in states) / len(states)

        def record(ms: float, head_ms: float) -> None:
            _share(states, "prefill", head_ms)
            self._prefills.append((drafting * (ms + head_ms), num_head_tokens, head_ms))

        self.when_passed(lambda ms: _share(states, "prefill", ms), watch)
        self.when_passed(record, watch, head)
        self.last_end = None

    def take_prefills(self) -> list[tuple[float, int, float]]:
        """Arguments for ``Controller.observe_prefill`` of the prefills whose times have become
        known."""
        self._record_passed()
        prefills, self._prefills = self._prefills, []
        return prefills

    def scheduler(self, num_reqs: int) -> None:
        """Time since the last iteration, in which nothing ran."""
        if self.last_end is not None:
            gap = self.watch().start(self.last_end)
            gap.stop()
            self._add(StageTime(Stage.SCHEDULER, num_reqs, 0, ms=0.0), gap)

    def draft_prefill(
        self, watch: Stopwatch, reqs: Sequence[Req], num_prefilled: Sequence[int]
    ) -> None:
        """A draft prefill of ``num_prefilled`` tokens per request."""
        total, states = sum(num_prefilled), [req.parse_state for req in reqs]

        def charge(ms: float) -> None:
            for state, count in zip(states, num_prefilled, strict=True):
                state.notes.telemetry.charge("draft", ms * count / total)

        self.when_passed(charge, watch)
        self._add(StageTime(Stage.DRAFT_PREFILL, total, 0, ms=0.0), watch)

    def draft(self, watch: Stopwatch, reqs: Sequence[Req], chunk: DraftChunk) -> None:
        states, num_tokens = [req.parse_state for req in reqs], chunk.tokens_per_request
        stage = StageTime(Stage.DRAFT, len(states), num_tokens, 0.0, chunk.num_forwards, chunk.kind)
        self.when_passed(lambda ms: _share(states, "draft", ms), watch)
        self._add(replace(stage, continued=chunk.continued), watch)

    def target(
        self,
        watch: Stopwatch,
        head: Stopwatch,
        reqs: Sequence[Req],
        forward: TargetForward,
        tokens: Sequence[Sequence[int]],
        num_steps: int = 0,
    ) -> None:
        """A target forward, charged to its requests by their rows.

        Args:
            head: what an EAGLE-3 head proposed before it, in ``num_steps``, and read after it.
            tokens: per request of ``reqs`` its output tokens.
        """
        parts = forward.parts
        states, actions = [reqs[x.index].parse_state for x in parts], {x.action for x in parts}
        # A proposal is booked as a decode step of several tokens (``sources.eagle``).
        decoded = [tokens[part.index] for part in parts if part.action is not Action.VERIFY]
        num_decoding, num_decoded = len(decoded), sum(map(len, decoded))
        head_stage = "draft" if Action.PROPOSE in actions else "decode"

        def charge(ms: float) -> None:
            for state, part in zip(states, parts, strict=True):
                stage = "decode" if part.action is Action.DECODE else "verify"
                state.notes.telemetry.charge(stage, ms * part.layout.num_rows / forward.num_rows)

        def record(ms: float, head_ms: float) -> None:
            _share([state for state in states if state.policy.uses_eagle], head_stage, head_ms)
            if Action.VERIFY in actions:
                stage = Stage.VERIFY, forward.num_rows, 0
            else:
                stage = Stage.DECODE, num_decoding, num_decoded
            rows, share = forward.num_rows, 1 - num_decoding / len(parts)
            timed = StageTime(*stage, ms + head_ms, num_steps, graphs=forward.graphs)
            self._stages.append(replace(timed, num_rows=rows, head_ms=head_ms, share=share))

        self.when_passed(charge, watch)
        self.when_passed(record, watch, head)


def _share(states: Sequence[RequestState], stage: str, ms: float) -> None:
    """Charges a stage to requests in equal parts."""
    for state in states:
        state.notes.telemetry.charge(stage, ms / len(states))
