"""Prefill: the prompt's KV, and the first token.

Everything is launched before the first token is read, the only wait. The draft model reads the
prompt when a draft begins (``drafting.kv_marks``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sglang.srt.managers.utils import GenerationBatchResult

from sglang_parse.attention.spec_input import ParseDraftInput
from sglang_parse.core.request import RequestState
from sglang_parse.engine.batch import tokens_left
from sglang_parse.engine.broadcast import NO_TOKEN, broadcast_object
from sglang_parse.engine.faults import NAN_IN_TARGET, end_request
from sglang_parse.engine.iteration import Engine
from sglang_parse.engine.target import LaunchedPrefill


def prefill(engine: Engine, batch: Any, **kwargs: Any) -> GenerationBatchResult:
    """Prefill ``batch``; requests whose prompt is complete begin.

    Args:
        engine: the server's.
        batch: SGLang's ``ScheduleBatch``, in an extend mode.
        kwargs: SGLang's, for its own worker.
    """
    started = time.perf_counter()
    for req in batch.reqs:
        if getattr(req, "parse_state", None) is None:
            req.parse_state = RequestState(req.parse_policy)
    launched, reading = _launch_models(engine, batch, **kwargs)
    first_ids = launched.read(len(batch.reqs))
    share_ms = (time.perf_counter() - started) * 1e3 / len(batch.reqs)
    for req in batch.reqs:
        req.parse_state.charge(prefill=share_ms)
    num_drafting = sum(not req.parse_state.policy.is_plain for req in batch.reqs)
    engine.controller.observe_prefill(*broadcast_object((num_drafting * share_ms, *reading)))
    _begin(engine, batch, first_ids)
    result = launched.result
    result.next_draft_input = ParseDraftInput()
    result.new_seq_lens = batch.seq_lens
    return result


def _launch_models(
    engine: Engine, batch: Any, **kwargs: Any
) -> tuple[LaunchedPrefill, tuple[int, float]]:
    """Target and EAGLE-3 head write the same slots; the draft model will, if it comes to that.

    Returns:
        The prefill, and what the head read of it: tokens, and ms (where a device works beside the
        host, those of the launch: less than it costs).
    """
    launched = engine.target.prefill(batch, **kwargs)
    engine.draft.kv.clear(batch.out_cache_loc)
    for req, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
        req.parse_state.restart(length, req.output_ids)
    started = time.perf_counter()
    num_read = engine.head.prefill(batch, launched.result)
    return launched, (num_read, (time.perf_counter() - started) * 1e3)


def _begin(engine: Engine, batch: Any, first_ids: Sequence[int | None]) -> None:
    """Requests whose prompt is complete have their first token, and drafting may start."""
    for req, first_id in zip(batch.reqs, first_ids, strict=True):
        state: RequestState = req.parse_state
        if first_id == NO_TOKEN:
            state.fail(NAN_IN_TARGET)
        if state.fault:
            end_request(req, state.fault)
        elif req is not batch.chunked_req:
            over = _is_over(req, first_id)
            state.begin(state.standing if over else engine.rounds.begin(state), first_id)


def _is_over(req: Any, first_id: int | None) -> bool:
    """Whether the first token ends the answer: no draft is due then, and no pilot to be lost."""
    state: RequestState = req.parse_state
    return first_id in state.policy.stop_ids or tokens_left(req) <= 1
