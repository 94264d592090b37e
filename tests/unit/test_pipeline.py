"""The order in which iterations in flight are finished."""

from types import SimpleNamespace

import pytest

from sglang_parse.engine import overlap
from sglang_parse.engine.overlap import Pipeline

pytestmark = pytest.mark.unit


class InFlight:
    """An iteration that only records when it finishes."""

    def __init__(self, log: list[str], name: str, *, may_wait: bool = False) -> None:
        self.log, self.name, self.may_wait = log, name, may_wait

    def finish(self) -> None:
        self.log.append(self.name)


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    monkeypatch.setattr(overlap, "can_launch_before_sync", lambda step, _: step.may_wait)
    return Pipeline(SimpleNamespace(schedule=SimpleNamespace(invalidate=lambda: None)))


def test_the_next_plan_finishes_what_is_in_flight(pipeline, log):
    pipeline.add(InFlight(log, "draft"))
    pipeline.before_planning([])
    pipeline.before_planning([])
    assert log == ["draft"]


def test_a_decode_step_stays_in_flight_until_its_result_is_processed(pipeline, log):
    first, second = (InFlight(log, name, may_wait=True) for name in ("first", "second"))
    pipeline.add(first)
    pipeline.before_planning([])
    pipeline.add(second)
    assert log == []
    pipeline.finish(first)  # SGLang processes the first result while the second step runs
    pipeline.finish(first)
    assert log == ["first"]
    pipeline.before_planning([])
    assert log == ["first"]


def test_a_third_iteration_is_planned_with_one_in_flight_at_most(pipeline, log):
    for name in ("first", "second"):
        pipeline.add(InFlight(log, name, may_wait=True))
    pipeline.before_planning([])
    assert log == ["first"]


def test_iterations_finish_in_order(pipeline, log):
    steps = [InFlight(log, name, may_wait=True) for name in ("first", "second")]
    for step in steps:
        pipeline.add(step)
    pipeline.finish(steps[1])
    assert log == ["first", "second"]
