"""One decode iteration of every running request: plan -> draft -> verify -> commit.

    plan     each request takes an action, and KV slots for it
    draft    drafting requests get a chunk of draft tokens from the draft model
    verify   the other requests share one forward of the target, which verifies complete drafts
    commit   draft tokens are accepted, requests move on, tokens are output

SGLang launches iteration n + 1 before it processes the result of n (``overlap``). So draft and
verify launch their forwards and return; ``finish`` waits for the results and commits them. The
host waits for the draft chunk first, so that the stages' times stay apart; on a CPU, or where it
needs an EAGLE-3 proposal, even before it launches the target's forward.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_parse.core.phases import Action
from sglang_parse.engine.drafting.chunk import DraftChunk, is_drafting
from sglang_parse.engine.drafting.draft_prefill import is_prefilled
from sglang_parse.engine.drafting.drafter import Drafter
from sglang_parse.engine.faults import end_request
from sglang_parse.engine.logprobs import TokenLogprobs
from sglang_parse.engine.parts import Engine
from sglang_parse.engine.requests import is_gone, rows_by_action
from sglang_parse.engine.result import PendingResult
from sglang_parse.engine.schedule import free_slots
from sglang_parse.engine.sglang_types import Req, ScheduleBatch
from sglang_parse.engine.verify import TargetForward


class Step:
    """One decode iteration in flight.

    Args:
        batch: SGLang's ``ScheduleBatch``, isolated; a shallow copy is retained.
        draft_chunk: draft tokens per drafting request, as ``Schedule.apply`` planned it.
        event: see ``PendingResult``.

    Attributes:
        chunk, forward: what is in flight; None once the host has its results.
    """

    def __init__(
        self, engine: Engine, batch: ScheduleBatch, draft_chunk: int, event: Any = None
    ) -> None:
        self.engine, self.batch, self.draft_chunk = engine, copy.copy(batch), draft_chunk
        self.result = PendingResult(event)
        self._emitted: list[Sequence[int]] = [()] * len(batch.reqs)
        self._logprobs: dict[int, Sequence[TokenLogprobs]] = {}
        self._output = LogitsProcessorOutput(next_token_logits=None)
        self._keys = [engine.key_of(req) for req in batch.reqs]
        self.chunk: DraftChunk | None = None
        self.forward: TargetForward | None = None
        self._chunk_watch, self._forward_watch, self._head_watch = (
            engine.timer.watch() for _ in range(3)
        )

    def launch(self, before: Step | None = None) -> None:
        """Launches the draft chunk and the target's forward.

        Args:
            before: the iteration launched last, while it is in flight.
        """
        if before is None:
            self.engine.timer.scheduler(len(self.batch.reqs))
        rows = rows_by_action(self.batch.reqs)  # the plan, made by ``Schedule.apply``
        self._ask(rows[Action.END_DRAFT])
        self._draft(rows, before)
        self._verify(rows, before)

    def finish(self) -> None:
        self._finish_draft()
        self._commit()
        self._output_tokens()

    # -- draft ------------------------------------------------------------------

    def _draft(self, rows: Mapping[Action, Sequence[int]], before: Step | None) -> None:
        engine, drafter = self.engine, self.engine.drafter
        drafting = self._prefill_drafts(drafter, rows[Action.DRAFT]) if drafter else ()
        if drafter is None or not drafting:
            return
        previous, reqs = before.chunk if before else None, self._reqs(drafting)
        self.chunk = drafter.start(self.batch, drafting, previous)
        self._chunk_watch.start()
        with engine.draft_guard.contain(filter(is_drafting, reqs), ends_failures=True):
            self.chunk.launch(self.draft_chunk, previous)
            self.result.can_run_cuda_graph = drafter.model.replays
        if rows[Action.EAGLE_DECODE] or not drafter.model.runs_ahead:
            self._finish_draft()

    def _prefill_drafts(self, drafter: Drafter, rows: Sequence[int]) -> Sequence[int]:
        """Prefills what the draft model lacks; returns the rows that can draft now."""
        reqs, engine = self._reqs(rows), self.engine
        with engine.draft_guard.contain(reqs):
            with engine.timer.start() as watch:
                num_prefilled = drafter.prefill_missing(reqs)
            if any(num_prefilled):
                engine.timer.draft_prefill(watch, reqs, num_prefilled)
            return [row for row, req in zip(rows, reqs, strict=True) if is_prefilled(req)]
        return []

    def _finish_draft(self) -> None:
        chunk, self.chunk = self.chunk, None
        if chunk is None:
            return
        chunk.wait()
        if chunk.made is not None:  # nothing, if its launch failed
            self._chunk_watch.stop(chunk.made)
            self.engine.timer.draft(self._chunk_watch, self._reqs(chunk.rows), chunk)
        masks = chunk.layout.masks.value
        self.engine.counters.count("draft_forward_passes_total", chunk.num_forwards, masks)
        self._ask(chunk.finished)

    def _ask(self, rows: Sequence[int]) -> None:
        for req in self._reqs(rows):
            if not is_gone(req):
                self.engine.committer.ask(req)

    # -- verify -----------------------------------------------------------------

    def _verify(self, rows: Mapping[Action, Sequence[int]], before: Step | None) -> None:
        engine, proposals = self.engine, dict[int, list[int]]()
        drafted, eagle, decoding = (
            rows[action] for action in (Action.VERIFY, Action.EAGLE_DECODE, Action.DECODE)
        )
        if engine.eagle is not None and eagle:
            with self._head_watch:
                proposals = engine.eagle.propose(self.batch, eagle)
        self._forward_watch.start()
        if drafted or eagle:
            self.forward = engine.verifier.verify(self.batch, drafted, proposals, decoding)
            engine.counters.count("verify_passes_total", self.forward.num_passes)
            engine.counters.count("verify_rows_total", self.forward.num_verify_rows)
        elif decoding:
            reqs = self._reqs(decoding)
            last_ids = before.forward.last_tokens(reqs) if before and before.forward else None
            self.forward = engine.verifier.decode(self.batch, decoding, last_ids)
            for req in reqs:
                req.parse_state.launch_decode()
        if self.forward is not None:
            self.result.can_run_cuda_graph = self.forward.replays

    # -- commit -----------------------------------------------------------------

    def _commit(self) -> None:
        self.engine.committer.poll(self.batch.reqs)
        forward, self.forward = self.forward, None
        if forward is None:
            return
        batch, engine, results = self.batch, self.engine, forward.wait()
        for result in results:
            req = batch.reqs[result.row]
            if forward.is_decode_only:
                req.parse_state.arrive_decode()
            if not is_gone(req):
                if forward.hidden is not None and req.parse_state.policy.keep_hidden_states:
                    result.hidden = forward.hidden[result.hidden_rows]
                tokens = self._emitted[result.row] = engine.committer.commit(req, result)
                self._logprobs[result.row] = result.logprobs_of(tokens)
        self._output = forward.output
        self._forward_watch.stop(forward.made)
        if engine.eagle is not None:
            with self._head_watch:
                engine.eagle.draft_extend(batch, results, forward.hidden, self._emitted)
        for result in results:
            req = batch.reqs[result.row]
            if result.action is Action.VERIFY and not is_gone(req):
                state = req.parse_state
                length = state.committed_len + len(self._emitted[result.row])
                free_slots(batch, req, length + state.num_drafted)
        decoded = [len(self._emitted[r.row]) for r in results if r.action is not Action.VERIFY]
        watches = self._forward_watch, self._head_watch
        engine.timer.target(*watches, batch.reqs, forward, results, sum(decoded))

    def _output_tokens(self) -> None:
        engine, now = self.engine, time.perf_counter()
        engine.observe(engine.timer.take_stages(), self._keys, self._emitted)
        for row, req in enumerate(self.batch.reqs):
            if not is_gone(req) and req.parse_state.fault:
                end_request(req, req.parse_state.fault)
            elif not is_gone(req) and self._emitted[row]:
                req.parse_state.write(self._emitted[row])
                engine.committer.ask(req)
                engine.counters.observe_output(req.parse_state, now)
                continue
            self._emitted[row] = ()
        self.result.fill(self.batch, self._emitted, self._output, self._logprobs)

    def _reqs(self, rows: Sequence[int]) -> list[Req]:
        return [self.batch.reqs[row] for row in rows]
