"""Every wait of the host in an iteration, by the function that waits.

Iterations run on a GPU without numbers, where any other look at the device raises. Where functions
may wait at all: ``tests/unit/test_host_waits.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sglang_parse
from sglang_parse.core.doubt import LEVELS, Doubt
from sglang_parse.core.phases import Action, DraftPlan, Phase
from sglang_parse.engine.overlap import can_launch_before_sync
from support.fake_engine import (
    CHUNK,
    PROMPT,
    arrived,
    batch_of,
    drafting,
    drafting_batch,
    engine_for,
    in_blocks,
    launched,
    prefill_batch_of,
    request,
)

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("gpu")]

ROOT = Path(sglang_parse.__file__).parent
TOKENS = "engine/drafting/chunk.py:DraftChunk.wait"
MARKS = "engine/drafting/kv_marks.py:DraftKvMarks._marked_lengths"
RESULT = "engine/verify.py:TargetForward.wait"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """file:function of each wait, in order."""
    from sglang_parse.device import HostCopy

    found = []

    def read(copy: Any) -> Any:
        code = sys._getframe(1).f_code
        found.append(f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_qualname}")
        return arrived(copy)

    monkeypatch.setattr(HostCopy, "tolist", read)
    return found


def prefill_() -> None:
    from sglang_parse.engine.prefill import prefill

    batch = prefill_batch_of(request(0, Phase.DRAFTING, Action.DRAFT))
    prefill(engine_for(batch), batch)


def first_draft(cached: int) -> None:
    req = drafting(0, gap=PROMPT)
    req.cached_tokens, req.parse_state.draft_kv_found = cached, False
    step, _ = launched(*drafting_batch(req))
    step._finish_draft()


def chunk_behind_chunk(in_chunks: Callable[..., tuple[Any, Any]]) -> None:
    reqs = [drafting(0), drafting(1, top_k=5)]
    batch, engine = in_chunks(*reqs)
    engine.schedule.all_take = lambda *_: True
    first, _ = launched(batch, engine)
    assert can_launch_before_sync(first, reqs)
    second, _ = launched(batch, engine, first)
    first._finish_draft()
    second._finish_draft()


def pass_() -> None:
    step, _ = launched(
        batch_of(
            request(0, Phase.VERIFYING, Action.VERIFY, draft=5),
            request(1, Phase.VERIFYING, Action.VERIFY, draft=1, top_k=5),
            request(2, Phase.DECODING, Action.DECODE),
        )
    )
    step.forward.wait()


def step_behind_step() -> None:
    reqs = [request(i, Phase.PLAIN, Action.DECODE, top_k=1 + 4 * i) for i in range(2)]
    batch = batch_of(*reqs)
    first, engine = launched(batch)
    assert can_launch_before_sync(first, reqs)
    second, _ = launched(batch, engine, first)
    first.forward.wait()
    second.forward.wait()


@pytest.mark.parametrize(
    ("iterations", "expected"),
    [
        (prefill_, ["engine/target.py:PrefillForward.wait"]),
        # A chunk's tokens are two copies: the last ones keep the device busy meanwhile.
        (lambda: first_draft(0), [TOKENS] * 2),
        (lambda: first_draft(5), [MARKS, TOKENS, TOKENS]),
        (lambda: chunk_behind_chunk(drafting_batch), [TOKENS] * 4),
        (lambda: chunk_behind_chunk(in_blocks), [TOKENS] * 4),
        (pass_, [RESULT]),
        (step_behind_step, [RESULT] * 2),
    ],
    ids=["prefill", "first draft", "cached prompt", "tokens", "blocks", "pass", "steps"],
)
def test_where_the_host_waits(iterations: Callable[[], None], expected: list[str], waits: list):
    iterations()
    assert waits == expected


@pytest.mark.parametrize("in_chunks", [drafting_batch, in_blocks], ids=["tokens", "blocks"])
@pytest.mark.parametrize("asks", [False, True])
def test_a_pass_is_launched_before_the_last_tokens_of_its_draft_arrive(
    in_chunks: Callable[..., tuple[Any, Any]], asks: bool, waits: list
):
    """A wait less before it, but for where a question has the tokens in it."""
    req = drafting(0)
    req.sampling_params.max_new_tokens = 1 + CHUNK
    batch, engine = in_chunks(req)
    engine.judge = engine.judge if asks else None
    engine.schedule.all_take = lambda action, *_: action is Action.VERIFY
    first, _ = launched(batch, engine)
    state = req.parse_state
    assert can_launch_before_sync(first, [req]) is not asks
    if asks:
        first._finish_draft()
    before = [TOKENS] * (1 + asks)
    assert (waits, state.phase) == (before, Phase.VERIFYING)
    state.action = Action.VERIFY
    second, _ = launched(batch, engine, first)
    assert waits == before
    first._finish_draft()
    (result,) = second.forward.wait()
    assert waits == [TOKENS, TOKENS, RESULT]
    assert (state.num_drafted, state.num_draft_inflight, state.draft.num_ahead) == (CHUNK, 0, 0)
    assert len(result.target_tokens) >= 1 + CHUNK


@pytest.mark.parametrize("in_chunks", [drafting_batch, in_blocks], ids=["tokens", "blocks"])
@pytest.mark.parametrize("is_sure", [True, False])
def test_where_drafts_may_end_in_doubt_a_forward_runs_while_the_host_looks(
    in_chunks: Callable[..., tuple[Any, Any]], is_sure: bool, waits: list
):
    req = drafting(0)
    batch, engine = in_chunks(req)
    doubt = Doubt([float(is_sure)] * LEVELS, least=0.5)
    req.parse_state.plan = DraftPlan(512, 1, 512, doubt=doubt)
    step, _ = launched(batch, engine)
    assert step.chunk is not None
    # The last two forwards of a chunk are in flight when the host goes on; the first one brings a
    # token in doubt, while the second one runs.
    num_forwards = step.chunk.num_forwards if is_sure else 2
    assert (step.chunk.num_forwards, len(waits)) == (num_forwards, num_forwards - 1 - is_sure)
    assert num_forwards > 2 or not is_sure
    step._finish_draft()
    assert waits == [TOKENS] * num_forwards
    assert req.parse_state.draft.in_doubt is not is_sure
