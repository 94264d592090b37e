"""Stage times on a GPU, on two clocks: the host launches, the device runs.

The engine on a GPU without numbers; forwards and events live on a device that takes its time.
"""

from __future__ import annotations

from itertools import chain, repeat
from typing import Any

import pytest
import torch

from sglang_parse.core.phases import Action, Phase
from sglang_parse.core.stage import Stage, StageTime
from sglang_parse.engine.overlap import can_launch_before_sync
from support.fake_engine import (
    CHUNK,
    DRAFTED,
    PROMPT,
    SIZE,
    Runner,
    arrived,
    drafting,
    drafting_batch,
    in_blocks,
    launched,
    request,
)

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("device")]


class Device:
    """A host and a device, each with the time in ms until which it is busy."""

    def __init__(self) -> None:
        self.host = self.busy = 0.0

    def launch(self, host_ms: float, device_ms: float) -> None:
        """One whose kernels are launched one after another: none ends before its launch."""
        start = max(self.host, self.busy)
        self.host += host_ms
        self.busy = max(start + device_ms, self.host)


@pytest.fixture
def device(gpu: None, monkeypatch: pytest.MonkeyPatch) -> Device:
    """A runner's forward takes the next of ``runner.costs``: (host ms, device ms)."""
    from sglang_parse.device import HostCopy

    del gpu  # whose events have no time
    device, forward = Device(), Runner.forward

    class Event:
        def __init__(self, *, enable_timing: bool = False) -> None:
            self.is_timed, self.at = enable_timing, 0.0

        def record(self) -> None:
            self.at = max(device.host, device.busy)

        def query(self) -> bool:
            return device.host >= self.at

        def synchronize(self) -> None:
            device.host = max(device.host, self.at)

        def elapsed_time(self, end: Event) -> float:
            for event in (self, end):
                assert event.is_timed
                assert event.query()
            return end.at - self.at

    def run(runner: Any, forward_batch: Any) -> Any:
        device.launch(*next(runner.costs))
        return forward(runner, forward_batch)

    def read(copy: Any) -> Any:
        copy._copied.synchronize()
        return arrived(copy)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Runner, "forward", run)
    monkeypatch.setattr(HostCopy, "tolist", read)
    return device


def stages_of(engine: Any, stage: Stage) -> list[StageTime]:
    return [timed for timed in engine.timer.take_stages() if timed.stage is stage]


@pytest.mark.parametrize(
    ("host_ms", "device_ms"), [(10.1, 1.8), (0.1, 1.8)], ids=["pieces", "graph"]
)
def test_chunks_that_run_ahead(host_ms: float, device_ms: float):
    """Also the last one, which none follows. The host's clock gave 0.39 ms for 10.1."""
    reqs = [drafting(0)]
    batch, engine = in_blocks(*reqs, num_blocks=2)
    engine.drafter.model.draft_runner.costs = repeat((host_ms, device_ms))
    steps = [launched(batch, engine)[0]]
    for _ in range(2):
        assert can_launch_before_sync(steps[-1], reqs)
        steps.append(launched(batch, engine, steps[-1])[0])
        steps[-2]._finish_draft()
    steps[-1]._finish_draft()
    chunks = stages_of(engine, Stage.DRAFT)
    assert [chunk.num_forwards for chunk in chunks] == [2, 2, 2]
    per_forward = [chunk.ms / chunk.num_forwards for chunk in chunks]
    assert per_forward == pytest.approx([max(host_ms, device_ms)] * 3, rel=0.05)
    drafted_ms = reqs[0].parse_state.notes.telemetry.stats.draft_ms
    assert drafted_ms == pytest.approx(6 * max(host_ms, device_ms), rel=0.05)
    assert reqs[0].parse_state.num_drafted == 6 * DRAFTED < 6 * SIZE


def test_a_chunk_and_a_target_forward(device: Device):
    """The launch of one is not the other's time."""
    batch, engine = drafting_batch(drafting(0), request(1, Phase.DECODING, Action.DECODE))
    engine.drafter.model.draft_runner.costs = repeat((0.2, 1.0))
    engine.verifier.target.runner.costs = repeat((14.0, 8.0))
    step, _ = launched(batch, engine)
    step._finish_draft()
    step.forward.wait()
    step._forward_watch.stop(step.forward.made)
    assert [timed.ms for timed in stages_of(engine, Stage.DRAFT)] == pytest.approx([CHUNK])
    assert step._forward_watch.ms == pytest.approx(8.0, abs=0.2 * CHUNK)
    assert device.host == pytest.approx(CHUNK + 8.0, abs=0.2 * CHUNK)


def test_compiled_kernels_are_not_in_the_mean():
    """Four chunks, of which the first takes 40 ms more."""
    batch, engine = drafting_batch(drafting(0))
    engine.drafter.model.draft_runner.costs = chain([(40.2, 1.06)], repeat((0.2, 1.06)))
    for _ in range(4):
        step, _ = launched(batch, engine)
        step._finish_draft()
        engine.controller.observe(engine.timer.take_stages(), [((0.5, ""), 0)])
    assert engine.controller.blocks.per_token(1) == pytest.approx(1.06)


def test_a_draft_prefill_is_read_when_it_has_passed(
    device: Device, monkeypatch: pytest.MonkeyPatch
):
    """The host waits for its drafts only."""
    from sglang_parse.engine.drafting import draft_prefill

    monkeypatch.setattr(draft_prefill, "MAX_PENDING", 3)
    req = drafting(0, gap=PROMPT)
    batch, engine = drafting_batch(req)
    engine.drafter.model.draft_runner.costs = repeat((0.2, 5.0))
    step, _ = launched(batch, engine)
    assert device.host < 5.0
    assert engine.timer.take_stages() == []
    step._finish_draft()
    prefill, chunk = (timed for timed in engine.timer.take_stages())
    assert (prefill.stage, prefill.size, prefill.ms) == (Stage.DRAFT_PREFILL, PROMPT, 5.0)
    assert (chunk.stage, chunk.ms) == (Stage.DRAFT, pytest.approx(CHUNK * 5.0))
    assert req.parse_state.notes.telemetry.stats.draft_ms == pytest.approx(prefill.ms + chunk.ms)
