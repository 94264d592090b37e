"""The order in which iterations under way are read, whoever asks first."""

from types import SimpleNamespace

import pytest
import torch

from sglang_parse.engine.iteration import unread_tokens
from sglang_parse.engine.overlap import Pipeline

pytestmark = pytest.mark.unit


class Launched:
    """An iteration that only notes when it is read."""

    def __init__(self, log: list[str], name: str, *, may_wait: bool = False) -> None:
        self.log, self.name, self.may_wait = log, name, may_wait

    def finish(self) -> None:
        self.log.append(self.name)

    def can_launch_before_sync(self, _: list) -> bool:
        return self.may_wait

    def last_tokens(self, reqs: list) -> torch.Tensor:
        return torch.tensor([7] * len(reqs))


@pytest.fixture
def log() -> list[str]:
    return []


def test_the_next_plan_reads_what_is_under_way(log):
    pipeline = Pipeline(engine=None)
    pipeline.add(Launched(log, "draft"))
    pipeline.before_planning([])
    pipeline.before_planning([])
    assert log == ["draft"]


def test_a_step_stays_unread_until_its_result_is_processed(log):
    pipeline = Pipeline(engine=None)
    first, second = (Launched(log, name, may_wait=True) for name in ("first", "second"))
    pipeline.add(first)
    pipeline.before_planning([])
    pipeline.add(second)
    assert log == []
    pipeline.finish(first)  # SGLang processes the first result while the second step runs
    pipeline.finish(first)
    assert log == ["first"]
    pipeline.before_planning([])
    assert log == ["first"]


def test_never_two_unread_when_a_third_is_planned(log):
    pipeline = Pipeline(engine=None)
    for name in ("first", "second"):
        pipeline.add(Launched(log, name, may_wait=True))
    pipeline.before_planning([])
    assert log == ["first"]


def test_results_are_read_in_order(log):
    pipeline = Pipeline(engine=None)
    iterations = [Launched(log, name, may_wait=True) for name in ("first", "second")]
    for iteration in iterations:
        pipeline.add(iteration)
    pipeline.finish(iterations[1])
    assert log == ["first", "second"]


def test_tokens_come_from_the_device_only_while_nobody_has_read_them(log):
    def requests(num_inflight: int) -> list:
        return [SimpleNamespace(parse_state=SimpleNamespace(num_inflight=num_inflight))] * 2

    step = Launched(log, "step", may_wait=True)
    assert unread_tokens(None, requests(0)) is None
    assert unread_tokens(step, requests(1)).tolist() == [7, 7]
    assert unread_tokens(step, requests(0)) is None
