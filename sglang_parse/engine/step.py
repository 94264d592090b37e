"""One decode iteration of every running request: plan -> draft -> verify -> accept -> move on.

    plan      each request takes an action, and KV slots for it
    draft     drafting requests get a chunk of draft tokens from the draft model
    verify    heads propose; the others share one forward of the target, which verifies drafts
    accept    draft tokens are accepted; what they and the target's own tokens make is output
    move on   requests start drafts behind their output, or decode; complete drafts are asked about

SGLang launches iteration n + 1 before it processes the result of n (``overlap``): draft and verify
launch their forwards, ``finish`` waits for them. The host waits for the draft chunk first, so that
stages' times stay apart; on a CPU or for a proposal, before it launches the target's forward.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_parse.core.phases import Action
from sglang_parse.core.round import Round
from sglang_parse.engine.drafting.chunk import DraftChunk, is_drafting
from sglang_parse.engine.drafting.draft_prefill import is_prefilled, prefill_missing
from sglang_parse.engine.drafting.drafter import Drafter
from sglang_parse.engine.faults import end_request
from sglang_parse.engine.logits.logprobs import TokenLogprobs
from sglang_parse.engine.parts import Engine
from sglang_parse.engine.requests import indices_by_action, is_gone
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
        self._keys = [engine.key_of(req) for req in batch.reqs]
        self._logprobs: dict[int, Sequence[TokenLogprobs]] = {}
        self.chunk: DraftChunk | None = None
        self.forward: TargetForward | None = None
        self._chunk_watch, self._forward_watch, self._head_watch = (
            engine.timer.watch() for _ in range(3)
        )

    def launch(self, before: Step | None = None) -> None:
        """Launches the draft chunk and the target's forward; ``before`` is the iteration launched
        last, while it is in flight."""
        if before is None:
            self.engine.timer.scheduler(len(self.batch.reqs))
        # The plan, made by ``Schedule.apply``.
        by_action = indices_by_action([req.parse_state.action for req in self.batch.reqs])
        self._draft(by_action, before.chunk if before else None)
        self._verify(by_action, before)

    def finish(self) -> None:
        self._finish_draft()
        self.engine.committer.poll(self.batch.reqs)
        rounds = self._accept()
        self._move_on(rounds)
        self._output(rounds)

    # -- launch -----------------------------------------------------------------

    def _draft(self, by_action: Mapping[Action, Sequence[int]], before: DraftChunk | None) -> None:
        engine, drafter = self.engine, self.engine.drafter
        drafting = self._prefill_drafts(drafter, by_action[Action.DRAFT]) if drafter else ()
        if drafter is None or not drafting:
            return
        self.chunk, reqs = drafter.start(self.batch, drafting, before), self._reqs(drafting)
        self._chunk_watch.start()
        with engine.draft_guard.contain(filter(is_drafting, reqs), ends_failures=True):
            self.chunk.launch(self.draft_chunk, before)
            self.result.can_run_cuda_graph = drafter.model.replays
        if by_action[Action.PROPOSE] or not drafter.model.runs_ahead:
            self._finish_draft()

    def _prefill_drafts(self, drafter: Drafter, indices: Sequence[int]) -> Sequence[int]:
        """Prefills what the draft model lacks; returns those that can draft now."""
        reqs, engine = self._reqs(indices), self.engine
        with engine.draft_guard.contain(reqs):
            with engine.timer.start() as watch:
                num_prefilled = prefill_missing(drafter.model, reqs)
            if any(num_prefilled):
                engine.timer.draft_prefill(watch, reqs, num_prefilled)
            return [i for i, req in zip(indices, reqs, strict=True) if is_prefilled(req)]
        return []

    def _verify(self, by_action: Mapping[Action, Sequence[int]], before: Step | None) -> None:
        engine = self.engine
        in_flight = (before.forward, before.chunk) if before else (None, None)
        if engine.eagle is not None and (proposing := by_action[Action.PROPOSE]):
            with self._head_watch:
                proposals = engine.eagle.propose(self.batch, proposing)
            engine.committer.take_proposals(self._reqs(proposing), proposals)
        self._forward_watch.start()
        self.forward = engine.verifier.launch(self.batch, by_action, *in_flight)
        if self.forward is not None:
            self.result.can_run_cuda_graph = self.forward.replays
            engine.counters.count("verify_passes_total", self.forward.num_passes)
            engine.counters.count("verify_rows_total", self.forward.num_verify_rows)

    # -- finish -----------------------------------------------------------------

    def _finish_draft(self) -> None:
        chunk, self.chunk = self.chunk, None
        if chunk is None:
            return
        chunk.wait()
        if chunk.made is not None:  # nothing, if its launch failed
            self._chunk_watch.stop(chunk.made)
            self.engine.timer.draft(self._chunk_watch, self._reqs(chunk.indices), chunk)
        masks = chunk.kind.masks.value
        self.engine.counters.count("draft_forward_passes_total", chunk.num_forwards, masks)

    def _accept(self) -> Sequence[Round]:
        """Outputs what the target's forward brought; [requests], in the batch's order."""
        engine, reqs, (forward, self.forward) = self.engine, self.batch.reqs, (self.forward, None)
        rounds = [Round()] * len(reqs)
        if forward is None:
            return rounds
        results = forward.wait()
        for result in results:
            if not is_gone(reqs[result.index]):
                one = rounds[result.index] = engine.committer.accept(reqs[result.index], result)
                self._logprobs[result.index] = result.logprobs_of(one.tokens)
        self.result.logits_output = forward.output
        self._forward_watch.stop(forward.made)
        tokens = [one.tokens for one in rounds]
        if engine.verifier.states is not None:
            engine.verifier.states.settle(self.batch, forward.parts, tokens)
        if engine.eagle is not None:
            with self._head_watch:
                engine.eagle.draft_extend(self.batch, results, tokens)
        num_steps = engine.eagle.num_run if engine.eagle else 0
        engine.timer.target(self._forward_watch, self._head_watch, reqs, forward, tokens, num_steps)
        return rounds

    def _move_on(self, rounds: Sequence[Round]) -> None:
        """Frees what was rejected, too, but not a carry-over's slots or the next proposal's."""
        freed = []
        for req, one in zip(self.batch.reqs, rounds, strict=True):
            if is_gone(req):
                continue
            state = req.parse_state
            self.engine.committer.move_on(req, one)
            if one.tokens and state.action is Action.VERIFY:
                freed.append((req, state.committed_len + state.num_drafted))
        free_slots(self.batch.tree_cache, freed)

    def _output(self, rounds: Sequence[Round]) -> None:
        engine, emitted, now = self.engine, [one.tokens for one in rounds], time.perf_counter()
        engine.observe(engine.timer.take_stages(), self._keys, emitted)
        for i, req in enumerate(self.batch.reqs):
            if is_gone(req):
                continue
            if req.parse_state.fault:
                end_request(req, req.parse_state.fault)
                emitted[i] = ()
            elif emitted[i]:
                engine.counters.sample_itl(req.parse_state, now)
        self.result.fill(self.batch, emitted, self._logprobs)

    def _reqs(self, indices: Sequence[int]) -> list[Req]:
        return [self.batch.reqs[i] for i in indices]
