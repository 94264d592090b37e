"""Iterations in flight, and the order in which SGLang drives them.

For every decode iteration SGLang calls:

    take_prefilled   requests join, on a decode server            ``ParseAlgorithm``
    slots_required   capacity check; changes nothing              patches.parse.kv_by_phase
    plan             actions and KV slots                         patches.parse.kv_by_phase
    seq_lens         ``NoOpFutureMap.resolve_seq_lens_cpu``       overlap schedule
    launch           ``ParseWorker.forward_batch_generation``
    synchronize      the result's ``copy_done``                   before it processes the result

Under the overlap schedule it launches an iteration before it processes the previous result:

    scheduler   plan n, launch n | process n - 1 | plan n + 1, launch n + 1 | process n | ...
    device                       [ iteration n ..................... ]      [ iteration n + 1 ...

The next plan usually needs the results: its shape follows from drafts and verdicts. So planning
waits for them. It does not after an iteration of decode steps alone, whose tokens the next step
needs on the device only, or of a draft chunk alone whose requests all keep drafting, or whose
drafts all end: their pass takes the last tokens on the device (``verifies_ahead``). A request that
a decoded token lets draft again has decoded one token too many: it is dropped. A text waits for
that token instead, and its request's next step for this one's (``core.arming``).

Without overlap every iteration is finished when ``launch`` returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_parse.context import process_context
from sglang_parse.core.phases import Action
from sglang_parse.device import on_device
from sglang_parse.engine import admission
from sglang_parse.engine.drafting.chunk import DraftChunk, is_drafting
from sglang_parse.engine.parts import Engine
from sglang_parse.engine.prefill import take_prefilled
from sglang_parse.engine.requests import is_adjusted
from sglang_parse.engine.schedule import free_lookahead
from sglang_parse.engine.sglang_types import Req, ScheduleBatch
from sglang_parse.engine.step import Step


class Pipeline:
    """Iterations in flight in this process, the oldest first: one, for a moment two."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._in_flight: deque[Step] = deque()
        self._draft_chunk = 0

    # -- SGLang's calls, in order -----------------------------------------------

    def receive(self, req: Req) -> None:
        """A request joins the waiting queue; one that PARSE fails to admit is refused."""
        try:
            admission.admit(self.engine, req)
        except Exception as error:  # noqa: BLE001 - whatever it is, others are served on
            req.parse_policy, req.parse_incoming = admission.REFUSED, {}
            req.set_finish_with_abort(f"PARSE: {type(error).__name__}")

    def take_prefilled(self, batch: ScheduleBatch) -> None:
        """Requests join whose prompts another server has prefilled."""
        self.finish()
        take_prefilled(self.engine, batch)

    def slots_required(self, batch: ScheduleBatch, requests: Sequence[Req], page_size: int) -> int:
        """Slots that the next iteration of ``requests`` takes from the pool. If they exceed what is
        free, plain decoding would not fit either, and SGLang retracts.

        Source: ``ScheduleBatch._new_tokens_required_next_decode_spec_v2``.
        """
        del page_size
        self.before_planning(requests)
        return self.engine.schedule.plan_iteration(batch, requests).num_required

    def plan(self, batch: ScheduleBatch) -> None:
        """Gives every request its action and KV slots."""
        self.before_planning(batch.reqs)
        self._draft_chunk = self.engine.schedule.apply(batch)

    def launch(self, batch: ScheduleBatch) -> GenerationBatchResult:
        before = self._in_flight[-1] if self._in_flight else None
        event = _FinishEvent(self)
        step = event.step = Step(self.engine, batch, self._draft_chunk, event)
        step.launch(before)
        self.add(step)
        if not batch.enable_overlap:
            self.finish()
        return step.result

    def note_allocated(self, allocator: Any, slots: torch.Tensor) -> None:
        """KV slots have a new owner, for whatever reason: none has the draft model's KV."""
        drafter = self.engine.drafter
        if drafter is not None and drafter.model.kv.allocator is allocator:
            drafter.model.kv.note_allocated(slots)

    def free_lookahead(self, req: Req, cache: Any) -> None:
        """Frees the slots without committed tokens of a request that SGLang is about to release."""
        free_lookahead(cache, req)

    def finish(self, until: Step | None = None) -> None:
        """Finishes iterations in order: up to ``until``, or all of them."""
        if until is not None and until not in self._in_flight:
            return
        while self._in_flight:
            step = self._in_flight.popleft()
            step.finish()
            self.engine.schedule.invalidate()
            if step is until:
                return

    # -- helpers ----------------------------------------------------------------

    def add(self, step: Step) -> None:
        self._in_flight.append(step)
        self.engine.schedule.invalidate()

    def before_planning(self, reqs: Sequence[Req]) -> None:
        """Finishes the iterations whose results the next plan, of ``reqs``, depends on."""
        while len(self._in_flight) > 1:
            self.finish(self._in_flight[0])
        if self._in_flight and not can_launch_before_sync(self._in_flight[0], reqs):
            self.finish()


def can_launch_before_sync(step: Step, reqs: Sequence[Req]) -> bool:
    """Whether the next iteration, of ``reqs``, can be planned before ``step``'s results arrive."""
    chunk, forward, engine = step.chunk, step.forward, step.engine
    if chunk is not None and forward is None:
        # A draft that began before its prefill was processed looks for its draft KV again.
        if not all(req.parse_state.draft_kv_found for req in reqs):
            return False
        if chunk.can_follow(reqs):
            return engine.schedule.all_take(Action.DRAFT, step.batch, reqs)
        return verifies_ahead(engine, chunk, reqs)
    if chunk is not None or forward is None or not forward.is_decode_only:
        return False
    decoding = set(map(id, forward.decoding))
    return all(
        id(req) in decoding
        and req.parse_state.policy.allow_async_decode
        and not req.parse_state.notes.arming.waits
        and not req.parse_state.policy.uses_eagle
        and req.parse_state.target_decodes
        for req in reqs
    )


def verifies_ahead(engine: Engine, chunk: DraftChunk, reqs: Sequence[Req]) -> bool:
    """Whether the pass that verifies the drafts of ``reqs`` is launched behind their last chunk,
    before its tokens arrive: all drafts end with it, and nothing asks the host about them. Then
    these end here; where lengths are not fixed, somewhat short."""
    is_sure = "draft_tokens" in engine.controller.limits.fixed
    if not engine.reads_drafts_late or any(map(_asks_the_host, reqs)):
        return False
    if not chunk.ends(reqs, is_sure=is_sure):
        return False
    for req in filter(is_drafting, reqs):
        num_candidates = chunk.kind.size - 1
        if not engine.committer.candidates_pay(req, num_candidates):
            num_candidates = 0
        req.parse_state.verify_ahead(chunk.num_ahead(req, num_candidates))
    engine.schedule.invalidate()
    return engine.schedule.all_take(Action.VERIFY, chunk.batch, reqs)


def _asks_the_host(req: Req) -> bool:
    """Whether the tokens of the request's draft are looked at before its pass: by its sampling
    parameters, its log probabilities, or a text that may extend the draft."""
    state = req.parse_state
    is_looked_at = is_adjusted(req) or req.grammar is not None or req.return_logprob
    return is_looked_at or state.draft.room > 0 or state.policy.uses_eagle


class _FinishEvent:
    """Takes the place of the CUDA event that SGLang waits for before it processes a result."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.step: Step | None = None

    def synchronize(self) -> None:
        step, self.step = self.step, None  # the step's result refers to this event
        if step is not None:
            self._pipeline.finish(step)


class NoOpFutureMap(FutureMap):
    """Relays nothing; fills in the lengths of the sequences, which the host always has."""

    def __init__(self, *args: Any, needs_cpu_seq_lens: bool = True, **kwargs: Any) -> None:
        del needs_cpu_seq_lens
        super().__init__(*args, needs_cpu_seq_lens=True, **kwargs)

    def resolve_seq_lens_cpu(self, batch: ScheduleBatch, stream_ordered: bool = False) -> None:
        """Sets ``batch.seq_lens`` before the launch, outside the forward stream.

        A prefill's batch knows its own; it finishes what is in flight, because it will wait for
        its own results at once.
        """
        del stream_ordered
        if batch.forward_mode.is_extend():
            process_context().running_pipeline().finish()
            return
        lengths = [req.parse_state.committed_len for req in batch.reqs]
        batch.seq_lens_cpu = torch.tensor(lengths)
        batch.seq_lens = on_device(lengths, batch.device)
        batch.seq_lens_sum = sum(lengths)

    def publish(self, *_: Any, **__: Any) -> None:
        """Does nothing: lengths come from the requests."""

    def stash(self, *_: Any, **__: Any) -> None:
        """Does nothing: tokens stay with the requests."""

    def _resolve_spec_extras(self, batch: ScheduleBatch) -> None:
        """Does nothing: there are none."""
