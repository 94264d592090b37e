"""The iterations under way: what is on the device while the scheduler works on what came before.

SGLang calls, for every decode iteration, in this order:

    slots_required   would the next one fit? changes nothing         patches.parse.kv_by_phase
    plan             every request's move, and slots for it          patches.parse.kv_by_phase
    lengths          ``HostRelay.resolve_seq_lens_cpu``              the overlap schedule's relay
    launch           ``ParseWorker.forward_batch_generation``        an iteration is on its way
    synchronize      ``PendingResult.copy_done``                     it is read, decided, committed

Under the overlap schedule SGLang launches an iteration before it processes the result of the one
before:

    scheduler   plan n, launch n | process n - 1 | plan n + 1, launch n + 1 | process n | ...
    device                       [ iteration n ..................... ]      [ iteration n + 1 ...

An iteration's numbers stay on the device until somebody needs them. That is the plan of the next
iteration, whose shape follows from drafts and verdicts: it reads them first. But after plain steps
of the target alone the next step needs their tokens only on the device: it is launched unread, and
the tokens reach the host while it runs, when SGLang processes their result: it waits for what it
takes for a CUDA event (``_ReadBySglang``). A request whose segment such a token ended has then been
given a step too many: what it wrote is dropped, so that answers do not depend on the schedule. So
it is behind a burst alone whose requests all draft on: its last steps are read late (``burst``).

Without overlap every iteration is read at once, and none of this shows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_parse.context import process_context
from sglang_parse.device import on_device
from sglang_parse.engine import admission
from sglang_parse.engine.iteration import Engine, Iteration


class Pipeline:
    """The iterations under way in this process, the oldest first: one, for a moment two.

    Args:
        engine: the server's.

    Attributes:
        forward_stream: where the worker's forwards run; None before the first.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.forward_stream: Any = None
        self._underway: deque[Iteration] = deque()
        self._draft_chunk = 0

    # -- SGLang's calls, in their order -----------------------------------------

    def receive(self, req: Any) -> None:
        """A request is about to wait for its prefill."""
        admission.receive(self.engine, req)

    def slots_required(self, batch: Any, requests: Sequence[Any], page_size: int) -> int:
        """SGLang's capacity check: slots the next iteration of ``requests`` takes."""
        self.before_planning(requests)
        return self.engine.slots.required(batch, requests, page_size)

    def plan(self, batch: Any) -> None:
        """Every running request takes its move, and the slots it needs for it."""
        self.before_planning(batch.reqs)
        self._count_penalties(batch)
        self._draft_chunk = self.engine.slots.grant(batch)

    def launch(self, batch: Any) -> GenerationBatchResult:
        """The iteration that was planned; without overlap it is over when this returns."""
        before = self._underway[-1] if self._underway else None
        done = _ReadBySglang(self)
        done.iteration = iteration = Iteration(self.engine, batch, done)
        iteration.launch(self._draft_chunk, before)
        self.add(iteration)
        if not batch.enable_overlap:
            self.finish()
        return iteration.result

    def finish(self, until: Iteration | None = None) -> None:
        """Read, decide and commit what is under way, in order: up to ``until``, or all of it."""
        if until is not None and until not in self._underway:
            return
        while self._underway:
            oldest = self._underway.popleft()
            oldest.finish()
            if oldest is until:
                return

    # -- how --------------------------------------------------------------------

    def add(self, iteration: Iteration) -> None:
        self._underway.append(iteration)

    def before_planning(self, reqs: Sequence[Any]) -> None:
        """Read what the plan of the next iteration, of ``reqs``, has to know."""
        while len(self._underway) > 1:
            self.finish(self._underway[0])
        if self._underway and not self._underway[0].can_launch_before_sync(reqs):
            self.finish()

    def _count_penalties(self, batch: Any) -> None:
        """``ScheduleBatch.cumulate_penalty_output_tokens`` over what the worker has read.

        Under overlap SGLang's own goes by a token that is one step old.
        """
        orchestrator = batch.sampling_info.penalizer_orchestrator
        if orchestrator.is_required:
            last_ids = [req.parse_state.output_ids[-1] for req in batch.reqs]
            orchestrator.cumulate_output_tokens(on_device(last_ids, batch.device))

    def order_behind_forward(self, device: Any) -> None:
        """Whatever is launched from here on runs after the forwards that are under way."""
        if self.forward_stream is not None:
            torch.get_device_module(device).current_stream().wait_stream(self.forward_stream)


class _ReadBySglang:
    """In the place of the CUDA event SGLang waits for before it reads a result."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.iteration: Iteration | None = None

    def synchronize(self) -> None:
        iteration, self.iteration = self.iteration, None  # or they keep each other
        if iteration is not None:
            self._pipeline.finish(iteration)


class HostRelay(FutureMap):
    """Relays nothing; fills in the lengths of the requests' sequences.

    Arguments: as ``FutureMap``; the host always has the lengths.
    """

    def __init__(self, *args: Any, needs_cpu_seq_lens: bool = True, **kwargs: Any) -> None:
        del needs_cpu_seq_lens
        super().__init__(*args, needs_cpu_seq_lens=True, **kwargs)

    def resolve_seq_lens_cpu(self, batch: Any, stream_ordered: bool = False) -> None:
        """Set ``batch.seq_lens``, before the batch is launched and outside the forward stream.

        A prefill's batch knows its own; what is under way is read before it, because it will be
        read at once.
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
        """Nothing: lengths come from the requests."""

    def stash(self, *_: Any, **__: Any) -> None:
        """Nothing: tokens stay with the requests."""

    def _resolve_spec_extras(self, batch: Any) -> None:
        """Nothing: there are none."""
