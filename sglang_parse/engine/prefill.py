"""Prefill of prompts, here or by another server, and the first output token.

Everything launches before the host waits for the first token. The draft model prefills a prompt
when a draft begins (``drafting.draft_prefill``): from its token ids, whoever prefilled it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang.srt.managers.utils import GenerationBatchResult

from sglang_parse.attention.spec_input import ParseDraftInput
from sglang_parse.core.request import RequestState
from sglang_parse.engine.broadcast import broadcast_object
from sglang_parse.engine.faults import contain_request, end_request, fault_of
from sglang_parse.engine.logits.grammar import num_allowed, start_walk
from sglang_parse.engine.parts import Engine
from sglang_parse.engine.sglang_types import ScheduleBatch


def prefill(engine: Engine, batch: ScheduleBatch, **kwargs: Any) -> GenerationBatchResult:
    """Prefills ``batch``, which is in an extend mode; requests whose prompt is complete start to
    draft or to decode."""
    _prepare(engine, batch)
    num_eagle, head = 0, engine.timer.watch()
    watch = engine.timer.start()
    forward = engine.verifier.target.prefill(batch, **kwargs)
    given = _give_first_tokens(batch, forward.result)
    for req, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
        req.parse_state.restart(length, req.output_ids)
    watch.stop(forward.first_ids and forward.first_ids.made)
    if engine.eagle is not None:
        with head:
            num_eagle = engine.eagle.prefill(batch, forward.result)
    first_ids = forward.wait(len(batch.reqs))
    engine.timer.prefill(watch, head, batch.reqs, num_eagle)
    for observed in broadcast_object(engine.timer.take_prefills()):
        engine.controller.observe_prefill(*observed)
    complete = [req for req in batch.reqs if req is not batch.chunked_req]
    engine.sources.poll(complete, after_prefill=True)
    _begin_answers(engine, batch, first_ids, given)
    result = forward.result
    result.next_draft_input = ParseDraftInput()
    result.new_seq_lens = batch.seq_lens
    return result


def take_prefilled(engine: Engine, batch: ScheduleBatch) -> None:
    """Begins answers whose prompts another server has prefilled, and goes on with those that come
    back from a retraction with their KV. Their last output token is the anchor. ``batch`` is in the
    mode PREBUILT, behind its requests' matchers."""
    _prepare(engine, batch)
    for req, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
        req.parse_state.restart(length, req.output_ids)
    engine.sources.poll(batch.reqs, after_prefill=True)
    _begin_answers(engine, batch, [None] * len(batch.reqs), {})


def _prepare(engine: Engine, batch: ScheduleBatch) -> None:
    """Makes the states of new requests, and starts the walks of all whose prompts are complete."""
    for req in batch.reqs:
        if getattr(req, "parse_state", None) is None:
            req.parse_state = RequestState(req.parse_policy)
            with contain_request(req.parse_state, "its texts"):
                engine.sources.begin(req)
        req.parse_state.notes.grammar = None
        if req is not batch.chunked_req:
            start_walk(req, engine.verifier.target.runner.model_config.vocab_size)
    engine.schedule.invalidate()


def _begin_answers(
    engine: Engine, batch: ScheduleBatch, first_ids: Sequence[int | None], given: Mapping[int, int]
) -> None:
    """Begins the answers whose prompts are complete, and ends those that cannot begin.

    Args:
        first_ids: [requests] what the target chose.
        given: by index, what a client gave instead.
    """
    for i, (req, first_id) in enumerate(zip(batch.reqs, first_ids, strict=True)):
        state = req.parse_state
        if fault := fault_of([first_id]):
            state.fail(fault)
        if not state.fault and req is not batch.chunked_req:
            with contain_request(state, "its first draft"):
                engine.committer.begin(req, given.get(i, first_id))
        if state.fault:
            end_request(req, state.fault)


def _give_first_tokens(batch: ScheduleBatch, result: Any) -> dict[int, int]:
    """Replaces the first tokens of answers that a client gave; returns them by index."""
    given: dict[int, int] = {}
    for i, req in enumerate(batch.reqs):
        ids = req.parse_state.policy.draft_token_ids
        if not ids or req.output_ids or req is batch.chunked_req:
            continue
        if num_allowed(req, ids[:1]):
            given[i] = result.next_token_ids[i] = ids[0]
    return given
