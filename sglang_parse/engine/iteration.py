"""One decode iteration: launch -> read -> decide -> commit, for every running request at once.

The plan came before (``kv.KvSlots.grant``): each request knows its move. Drafters make a burst of
the draft model; all others share one forward of the target in which drafts are judged and the rest
continue. Both are read when their numbers are needed (``overlap``), the burst first: that keeps
their times apart. Where nothing runs beside the host, or it waits for an EAGLE-3 head's proposals,
the burst is read before the forward is launched.

    launch   rows of the batch, by move    -> DraftChunk | LaunchedPass | LaunchedSteps
    read     numbers reach the host        -> Spoken: readouts and token ids per request
    decide   ``rounds``                    -> Outcome per request: tokens, cut, what is next
    commit   slots and states follow, the EAGLE-3 head goes on, the result is filled
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.counters import Counters
from sglang_parse.core.phases import Action, Outcome, Phase
from sglang_parse.core.policy.controller import Controller
from sglang_parse.core.policy.stage_cost import Stage, StageTime
from sglang_parse.core.policy.threshold_stats import stats_key
from sglang_parse.core.request import RequestState
from sglang_parse.device import on_device, wait_for_device
from sglang_parse.engine.batch import PendingResult, is_gone, rows_by_action, spread_logprobs
from sglang_parse.engine.broadcast import broadcast_object
from sglang_parse.engine.drafting.chunk import DraftChunk
from sglang_parse.engine.drafting.draft_model import DraftModel
from sglang_parse.engine.drafting.draft_prefill import is_prefilled
from sglang_parse.engine.drafting.drafter import Drafter
from sglang_parse.engine.faults import DraftGuard, end_request
from sglang_parse.engine.head import GuardedHead
from sglang_parse.engine.kv import KvSlots, release_tail
from sglang_parse.engine.readout import Spoken
from sglang_parse.engine.rounds import Rounds
from sglang_parse.engine.steps import Steps
from sglang_parse.engine.target import LaunchedSteps, PlainTarget
from sglang_parse.engine.verify import LaunchedPass, Verifier
from sglang_parse.startup.certificates import Certified


@dataclass(slots=True)
class Engine:
    """The parts of one server's engine, the same for all iterations.

    Attributes:
        last_read: ``time.perf_counter`` when the last burst or iteration had been read.
        closed: the same when the last iteration was over; None once something else ran.
    """

    config: ParseConfig
    target: PlainTarget
    draft: DraftModel
    drafter: Drafter
    draft_guard: DraftGuard
    head: GuardedHead
    verifier: Verifier
    rounds: Rounds
    slots: KvSlots
    controller: Controller
    counters: Counters
    certified: Certified
    last_read: float = field(default=0.0)
    closed: float | None = None

    def ms_since(self, started: float) -> float:
        """What a stage took: not the time it waited for the iteration before."""
        return (time.perf_counter() - max(started, self.last_read)) * 1e3


class Iteration:
    """One step of every running request.

    Args:
        engine: what it works with.
        batch: SGLang's ``ScheduleBatch``, isolated; a view of it is kept until all is read.
        copy_done: see ``PendingResult``.
    """

    def __init__(self, engine: Engine, batch: Any, copy_done: Any = None) -> None:
        self._engine = engine
        self.batch = copy.copy(batch)
        self.result = PendingResult(copy_done)
        self._emitted: list[list[int]] = [[] for _ in batch.reqs]
        self._output = LogitsProcessorOutput(next_token_logits=None)
        self._timed: list[StageTime] = []
        self._burst: DraftChunk | None = None
        self._forward: LaunchedPass | LaunchedSteps | None = None
        self._steps_alone: Steps | None = None
        self._burst_started = self._forward_started = 0.0
        self._proposing_ms = 0.0  # of the forward's time; charged to those it was for

    # -- launch -----------------------------------------------------------------

    def launch(self, draft_chunk: int, before: Iteration | None = None) -> None:
        """Everything on its way on the device, the burst read if a forward follows it.

        Args:
            draft_chunk: draft tokens of a burst.
            before: the iteration launched last, if it is still unread.
        """
        self._time_the_host(before)
        rows = rows_by_action(self.batch.reqs)
        self._ask(rows[Action.END_DRAFT])
        if rows[Action.DRAFT]:
            self._launch_burst(rows[Action.DRAFT], draft_chunk, before)
            if rows[Action.EAGLE_DECODE] or not self._engine.draft.runs_ahead:
                self._finish_burst()  # the head's proposals are waited for as well
        if rows[Action.VERIFY] or rows[Action.EAGLE_DECODE]:
            self._launch_pass(rows)
        elif rows[Action.DECODE]:
            self._launch_steps(rows, before)

    def _time_the_host(self, before: Iteration | None) -> None:
        """What was between the iteration before and this one, if nothing runs meanwhile."""
        closed, self._engine.closed = self._engine.closed, None
        if closed is not None and before is None:
            ms = (time.perf_counter() - closed) * 1e3
            self._timed.append(StageTime(Stage.SCHEDULER, len(self.batch.reqs), 0, ms))

    def _launch_burst(
        self, rows: Sequence[int], draft_chunk: int, before: Iteration | None
    ) -> None:
        engine = self._engine
        rows = self._catch_up(rows)
        if not rows:
            return
        reqs = [self.batch.reqs[row] for row in rows]
        unfinished = (req for req in reqs if req.parse_state.phase is Phase.DRAFTING)
        unread = before._burst if before else None
        self._burst = engine.drafter.start(self.batch, rows, unread)
        self._burst_started = time.perf_counter()
        with engine.draft_guard.contain(unfinished, is_burst=True):
            self._burst.launch(draft_chunk, unread)
            self.result.can_run_cuda_graph = engine.draft.replays

    def _catch_up(self, rows: Sequence[int]) -> list[int]:
        """Those of ``rows`` that draft on now: the draft model has read what is before.

        That is waited for: a burst's time is its own.
        """
        engine, started = self._engine, time.perf_counter()
        reqs = [self.batch.reqs[row] for row in rows]
        with engine.draft_guard.contain(reqs):
            num_read = engine.drafter.prefill_missing(reqs)
            if any(num_read):
                wait_for_device(self.batch.device)
                self._time_the_fill(reqs, num_read, engine.ms_since(started))
            return [row for row, req in zip(rows, reqs, strict=True) if is_prefilled(req)]
        return []

    def _time_the_fill(self, reqs: Sequence[Any], num_read: Sequence[int], ms: float) -> None:
        readers = [(req, n) for req, n in zip(reqs, num_read, strict=True) if n]
        for req, n in readers:
            req.parse_state.charge(draft=ms * n / sum(num_read))
        states = [req.parse_state for req, _ in readers]
        accounts = tuple(stats_key(s.policy.threshold, s.num_failed) for s in states)
        self._timed.append(
            StageTime(Stage.DRAFT_PREFILL, sum(num_read), 0, ms, stats_keys=accounts)
        )

    def _launch_pass(self, rows: Mapping[Action, Sequence[int]]) -> None:
        engine, self._forward_started = self._engine, time.perf_counter()
        proposals = engine.head.propose(self.batch, rows[Action.EAGLE_DECODE])
        self._proposing_ms = (time.perf_counter() - self._forward_started) * 1e3
        launched = engine.verifier.launch(
            self.batch, rows[Action.VERIFY], proposals, rows[Action.DECODE]
        )
        if rows[Action.VERIFY]:
            engine.counters.count("verify_passes_total", launched.num_passes)
        self.result.can_run_cuda_graph = launched.replays
        self._forward = launched

    def _launch_steps(self, rows: Mapping[Action, Sequence[int]], before: Iteration | None) -> None:
        """No draft to judge: one ordinary decode step of the target."""
        self._forward_started = time.perf_counter()
        reqs = [self.batch.reqs[row] for row in rows[Action.DECODE]]
        launched = self._engine.target.launch_steps(
            self.batch, rows[Action.DECODE], unread_tokens(before, reqs)
        )
        for req in reqs:
            req.parse_state.launch_step()
        self._steps_alone = None if rows[Action.DRAFT] else launched.steps
        self.result.can_run_cuda_graph = launched.replays
        self._forward = launched

    # -- read, decide, commit ---------------------------------------------------

    def finish(self) -> None:
        """Whatever is not read yet is; requests move on, the result is filled."""
        self._finish_burst()
        self._finish_forward()
        self._close()

    def _finish_burst(self) -> None:
        burst, self._burst = self._burst, None
        if burst is None:
            return
        burst.wait()
        engine = self._engine
        elapsed_ms = engine.ms_since(self._burst_started)
        engine.last_read = time.perf_counter()
        size, forwards, plan = len(burst.rows), burst.num_forwards, burst.layout
        engine.counters.count("draft_forward_passes_total", forwards, plan.masks.value)
        self._timed.append(
            StageTime(Stage.DRAFT, size, burst.tokens_per_request, elapsed_ms, forwards, plan)
        )
        for row in burst.rows:
            self.batch.reqs[row].parse_state.charge(draft=elapsed_ms / len(burst.rows))
        self._ask(burst.finished)

    def _ask(self, rows: Sequence[int]) -> None:
        """Those of ``rows`` whose draft is over get their questions."""
        for row in rows:
            req = self.batch.reqs[row]
            questions = None if is_gone(req) else self._engine.rounds.questions(req)
            if questions is not None:
                req.parse_state.ask(questions)

    def _finish_forward(self) -> None:
        launched, self._forward = self._forward, None
        if launched is None:
            return
        spoken = launched.read()
        if isinstance(launched, LaunchedSteps):
            for row in launched.steps.rows:
                self.batch.reqs[row].parse_state.read_step()
        outcomes = self._engine.rounds.decide(self.batch, spoken)
        self._commit(launched, spoken, outcomes)
        self._account(launched, spoken)

    def _commit(
        self,
        launched: LaunchedPass | LaunchedSteps,
        spoken: Spoken,
        outcomes: Mapping[int, Outcome],
    ) -> None:
        """States follow what was decided; slots that a judged draft no longer needs go back."""
        batch = self.batch
        for row, outcome in outcomes.items():
            batch.reqs[row].parse_state.apply(outcome)
            self._emitted[row] = list(outcome.token_ids)
        if launched.steps is not None:
            self._output = launched.steps.output
            if launched.steps.has_logprobs:
                spread_logprobs(self._output, launched.steps.rows, len(batch.reqs))
        self._engine.head.follow(batch, launched.places, launched.hidden, self._emitted)
        for part, _ in spoken.judged:
            if not is_gone(req := batch.reqs[part.row]):
                state: RequestState = req.parse_state
                written_len = state.committed_len + len(self._emitted[part.row])
                release_tail(batch, req, written_len + state.num_drafted)

    def _close(self) -> None:
        """The iteration is over: its tokens are output, its times are learned from."""
        engine = self._engine
        engine.last_read = engine.closed = time.perf_counter()
        timed = broadcast_object(self._timed)
        engine.controller.observe(timed)
        engine.drafter.choice.observe(timed)
        engine.counters.expected_speedup = engine.controller.speedup
        engine.counters.last_plan = engine.controller.last_plan
        for req, tokens in zip(self.batch.reqs, self._emitted, strict=True):
            if is_gone(req):
                tokens.clear()
            elif req.parse_state.fault:
                end_request(req, req.parse_state.fault)
                tokens.clear()
            elif tokens:
                req.parse_state.write(tokens)
                engine.counters.observe_output(req.parse_state, engine.last_read)
        self.result.fill(self.batch, self._emitted, self._output)

    # -- accounting -------------------------------------------------------------

    def _account(self, launched: LaunchedPass | LaunchedSteps, spoken: Spoken) -> None:
        """Time the forward, and charge it to its requests by their rows."""
        elapsed_ms = self._engine.ms_since(self._forward_started)
        self._timed.append(self._timed_as(launched, spoken, elapsed_ms))
        judged = {part.row for part, _ in spoken.judged}
        ms_per_row = max(0.0, elapsed_ms - self._proposing_ms) / launched.num_rows
        for row, place in launched.places:
            state = self.batch.reqs[row].parse_state
            share_ms = ms_per_row * (place.stop - place.start)
            if row in judged:
                state.charge(verify=share_ms)
            else:
                state.charge(decode=share_ms)

    def _timed_as(
        self, launched: LaunchedPass | LaunchedSteps, spoken: Spoken, elapsed_ms: float
    ) -> StageTime:
        if spoken.judged:
            return StageTime(Stage.VERIFY, launched.num_rows, 0, elapsed_ms)
        if isinstance(launched, LaunchedSteps):
            num_tokens = len(spoken.stepped)
        else:
            num_tokens = sum(len(self._emitted[row]) for row in launched.writing)
        return StageTime(Stage.DECODE, len(launched.writing), num_tokens, elapsed_ms)

    # -- overlap ----------------------------------------------------------------

    def can_launch_before_sync(self, reqs: Sequence[Any]) -> bool:
        """Whether the next iteration, of ``reqs``, can be planned without all of this one's
        numbers: plain steps alone, for requests that need nothing of them, or a burst alone, for
        requests that surely draft on."""
        if self._burst is not None and self._forward is None:
            # Where a draft began before its prompt had its slots, the next burst looks for its KV.
            if not all(req.parse_state.draft_kv_found for req in reqs):
                return False
            has_room = self._engine.slots.all_burst
            return self._burst.can_follow(reqs) and has_room(self.batch, reqs)
        if self._steps_alone is None:
            return False
        stepping = {id(self.batch.reqs[row]) for row in self._steps_alone.rows}
        return all(
            id(req) in stepping
            and req.parse_state.policy.allow_async_decode
            and not req.parse_state.policy.uses_eagle
            and req.parse_state.is_stepping
            for req in reqs
        )

    def last_tokens(self, reqs: Sequence[Any]) -> torch.Tensor:
        """int64 [len(reqs)], on the device: what plain steps alone wrote for them.

        0 in place of ``NO_TOKEN``, whose request ends.
        """
        assert self._steps_alone is not None
        places = {id(self.batch.reqs[row]): i for i, row in enumerate(self._steps_alone.rows)}
        index = on_device([places[id(req)] for req in reqs], self.batch.device)
        return self._steps_alone.tokens[index].clamp(min=0)


def unread_tokens(before: Iteration | None, reqs: Sequence[Any]) -> torch.Tensor | None:
    """int64 [len(reqs)], on the device: their last tokens, or None where the host has them.

    Args:
        before: the iteration launched last, if it is still unread.
    """
    if before is None or not any(req.parse_state.num_inflight for req in reqs):
        return None
    return before.last_tokens(reqs)
