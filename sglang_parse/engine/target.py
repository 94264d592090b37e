"""The target alone: prefills, and one token per request and iteration (``head`` makes it more)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.model_runner import ModelRunnerOutput

from sglang_parse.device import HostCopy
from sglang_parse.engine.batch import needs_hidden_states, select_requests
from sglang_parse.engine.broadcast import broadcast_tokens
from sglang_parse.engine.faults import nan_rows
from sglang_parse.engine.readout import Spoken
from sglang_parse.engine.steps import Steps, choose_steps


@dataclass(frozen=True, slots=True)
class LaunchedSteps:
    """A decode step of the target under way, with no draft to judge.

    Attributes:
        steps: what it chose.
        hidden: [len(steps.rows), width] what an EAGLE-3 head reads of each row, if captured.
        replays: whether a CUDA graph was replayed.
    """

    steps: Steps
    hidden: torch.Tensor | None
    replays: bool

    @property
    def num_rows(self) -> int:
        return len(self.steps.rows)

    @property
    def writing(self) -> Sequence[int]:
        return self.steps.rows

    @property
    def places(self) -> list[tuple[int, slice]]:
        """(row of the batch, its row of the forward)."""
        return [(row, slice(i, i + 1)) for i, row in enumerate(self.steps.rows)]

    def read(self) -> Spoken:
        """Wait for the tokens."""
        return Spoken((), (), self.steps.read())


@dataclass(frozen=True, slots=True)
class LaunchedPrefill:
    """A prefill of the target under way.

    Attributes:
        result: SGLang's record of it, its tokens on the device; 0 in place of ``NO_TOKEN``.
        first_ids: int64 [requests] the tokens on their way to the host, ``broadcast.NO_TOKEN`` where
            logits held a NaN; None where no request wants one.
    """

    result: GenerationBatchResult
    first_ids: HostCopy | None

    def read(self, num_reqs: int) -> list[int | None]:
        """[num_reqs] first tokens, if any; waits for the target, not for what came after it."""
        return [None] * num_reqs if self.first_ids is None else self.first_ids.tolist()


class PlainTarget:
    """The target model through SGLang's own prefill and decode paths."""

    def __init__(self, target_worker: TpModelWorker) -> None:
        self.worker = target_worker
        self.runner = target_worker.model_runner

    def prefill(self, batch: Any, **kwargs: Any) -> LaunchedPrefill:
        """Prefill and sample; NaN logits are replaced in between.

        SGLang's sampler raises on NaN probabilities, which would end the server and not only
        the request.
        """
        self.worker.set_hicache_consumer(batch.hicache_consumer_index)
        forward_batch = ForwardBatch.init_new(
            batch,
            self.runner,
            capture_hidden_mode=_capture_mode(batch.reqs),
            return_hidden_states_before_norm=False,
        )
        if forward_batch.is_prefill_only:
            result = self.worker.forward_batch_generation(None, forward_batch, **kwargs)
            return LaunchedPrefill(result, None)
        result = self.worker.forward_batch_generation(None, forward_batch, is_verify=True, **kwargs)
        is_bad = nan_rows(result.logits_output.next_token_logits)
        tokens = self.runner.sample(result.logits_output, forward_batch)
        shared = broadcast_tokens(tokens, is_bad)
        result.next_token_ids = shared.clamp(min=0)
        return LaunchedPrefill(result, HostCopy(shared))

    def launch_steps(
        self, batch: Any, rows: Sequence[int], last_ids: torch.Tensor | None
    ) -> LaunchedSteps:
        """One ordinary decode step of the requests ``rows``; arguments as for ``decode``."""
        decoded = self.decode(batch, rows, last_ids)
        output = decoded.logits_output
        steps = choose_steps(self.runner, batch, rows, output.next_token_logits)
        return LaunchedSteps(steps, output.hidden_states, decoded.can_run_graph)

    def decode(
        self, batch: Any, rows: Sequence[int], last_ids: torch.Tensor | None = None
    ) -> ModelRunnerOutput:
        """The forward of a decode step.

        Args:
            batch: the scheduler's batch.
            rows: [n] indices into its requests.
            last_ids: int64 [n] their last output tokens, where only the device has them.

        Returns:
            SGLang's record; in its ``logits_output`` logits [len(rows), vocab] and, if captured,
            hidden states [len(rows), width].
        """
        forward_batch = ForwardBatch.init_new(
            _decode_view(batch, rows, last_ids),
            self.runner,
            capture_hidden_mode=_capture_mode([batch.reqs[row] for row in rows]),
            return_hidden_states_before_norm=False,
        )
        return self.runner.forward(forward_batch)


def _capture_mode(reqs: Sequence[Any]) -> CaptureHiddenMode | None:
    """What an EAGLE-3 head reads of every token, where it reads any of the requests."""
    return CaptureHiddenMode.FULL if needs_hidden_states(reqs) else None


def _decode_view(batch: Any, rows: Sequence[int], last_ids: torch.Tensor | None) -> Any:
    """An ordinary decode step of some requests: their last output token, one slot each."""
    lengths = [batch.reqs[row].parse_state.committed_len + 1 for row in rows]
    if last_ids is None:
        known = [batch.reqs[row].parse_state.output_ids[-1] for row in rows]
        view = select_requests(batch, rows, lengths, known)
    else:
        view = select_requests(batch, rows, lengths, last_ids)
    table = batch.req_to_token_pool.req_to_token
    view.out_cache_loc = table[view.req_pool_indices, view.seq_lens - 1].to(torch.int64)
    view.forward_mode = ForwardMode.DECODE
    view.spec_info = None
    return view
