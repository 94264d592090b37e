"""Draft model exceptions that a server survives; with a server: tests/e2e."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_parse.core.phases import RequestPolicy
from sglang_parse.core.request import RequestState
from sglang_parse.engine.faults import EAGLE_HEAD, MAX_DRAFT_FAILURES, DraftFailure, DraftGuard

pytestmark = pytest.mark.compat


def _request(*, plain: bool = False, finished: bool = False) -> SimpleNamespace:
    """The fields of ``Req`` the guard reads and writes."""
    policy = RequestPolicy(threshold=0.5, plain_reason="grammar" if plain else "")
    return SimpleNamespace(
        parse_state=RequestState(policy),
        finished=lambda: finished,
        skip_radix_cache_insert=False,
    )


def _fail(guard: DraftGuard, *reqs: SimpleNamespace, error: Exception | None = None) -> None:
    with guard.contain(reqs):
        raise error or RuntimeError("some reason")


def test_drafting_requests_end_and_none_enters_the_cache():
    drafting, plain, finished = _request(), _request(plain=True), _request(finished=True)
    _fail(DraftGuard(1), drafting, plain, finished)
    assert [req.skip_radix_cache_insert for req in (drafting, plain, finished)] == [True] * 3
    assert [req.parse_state.fault for req in (drafting, plain, finished)] == [
        "the draft model failed: RuntimeError('some reason')",
        "",
        "",
    ]


@pytest.mark.parametrize(
    ("num_ranks", "error", "reason"),
    [
        (2, RuntimeError("some reason"), "the other 1 ranks wait"),
        (1, torch.AcceleratorError("some reason"), "device is unusable"),
    ],
)
def test_fatal_errors_name_the_reason(num_ranks: int, error: Exception, reason: str):
    req = _request()
    with pytest.raises(DraftFailure, match=f"some reason.*{reason}"):
        _fail(DraftGuard(num_ranks), req, error=error)
    assert not req.parse_state.fault


def test_consecutive_failures_end_the_server_and_a_success_resets_the_count():
    guard = DraftGuard(1)
    for _ in range(3):
        for _ in range(MAX_DRAFT_FAILURES - 1):
            _fail(guard, _request())
        with guard.contain([], ends_failures=True):
            pass
    for _ in range(MAX_DRAFT_FAILURES - 1):
        _fail(guard, _request())
        with guard.contain([]):
            pass  # a prefill
    with pytest.raises(DraftFailure, match="3 times in a row"):
        _fail(guard, _request())


def test_each_model_has_its_own_count():
    guard = DraftGuard(1)
    for _ in range(MAX_DRAFT_FAILURES - 1):
        _fail(guard, _request())
        with guard.contain([], model=EAGLE_HEAD, ends_failures=True):
            pass
    with pytest.raises(DraftFailure, match="the draft model failed .* 3 times in a row"):
        _fail(guard, _request())


def test_an_interrupt_is_not_a_draft_failure():
    with pytest.raises(KeyboardInterrupt), DraftGuard(1).contain([]):
        raise KeyboardInterrupt
