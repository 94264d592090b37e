"""The target model through SGLang's own prefill and decode forwards."""

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
from sglang_parse.engine.batch import select_requests
from sglang_parse.engine.broadcast import broadcast
from sglang_parse.engine.faults import mark_faults, nan_rows
from sglang_parse.engine.logits.adjust import adjust
from sglang_parse.engine.logits.rows import LogitsRows
from sglang_parse.engine.logits.sampling import without_adjustments
from sglang_parse.engine.requests import is_adjusted, needs_hidden_states
from sglang_parse.engine.sglang_types import Req, ScheduleBatch
from sglang_parse.engine.step_graphs import StepGraphs


@dataclass(frozen=True, slots=True)
class PrefillForward:
    """A target prefill in flight.

    Attributes:
        result: SGLang's result, its tokens on the device; 0 in place of the next two.
        first_ids: int64 [requests] the sampled tokens, or ``faults.mark_faults``'s; None if the
            prefill samples none.
    """

    result: GenerationBatchResult
    first_ids: HostCopy | None

    def wait(self, num_reqs: int) -> list[int | None]:
        """[num_reqs] first tokens, if any; does not wait for later forwards."""
        return [None] * num_reqs if self.first_ids is None else self.first_ids.tolist()


class TargetModel:
    """The target's worker.

    Attributes:
        pass_graphs: ``PassGraphs``, smallest first; ``step_graphs``: where there are none.
    """

    pass_graphs: Sequence[Any] = ()
    step_graphs: Sequence[StepGraphs] = ()

    def __init__(self, target_worker: TpModelWorker) -> None:
        self.worker = target_worker
        self.runner = target_worker.model_runner

    def prefill(self, batch: ScheduleBatch, **kwargs: Any) -> PrefillForward:
        """Prefills and samples. NaN logits are replaced in between, because SGLang's sampler raises
        on them, which would end the server."""
        self.worker.set_hicache_consumer(batch.hicache_consumer_index)
        forward_batch = ForwardBatch.init_new(
            batch,
            self.runner,
            capture_hidden_mode=_capture_mode(batch.reqs),
            return_hidden_states_before_norm=False,
        )
        if forward_batch.is_prefill_only:
            result = self.worker.forward_batch_generation(None, forward_batch, **kwargs)
            return PrefillForward(result, None)
        graphs = self.graphs_of(forward_batch) if _is_text(batch, forward_batch) else None
        if graphs is None:
            run = self.worker.forward_batch_generation
            result = run(None, forward_batch, is_verify=True, **kwargs)
        else:
            output, _ = graphs.run(forward_batch)
            result = GenerationBatchResult(logits_output=output, can_run_cuda_graph=True)
        logits = result.logits_output.next_token_logits
        is_bad, is_empty = nan_rows(logits), None
        adjusted = [
            LogitsRows(req, i, before=req.output_ids)
            for i, req in enumerate(batch.reqs)
            if is_adjusted(req)
        ]
        if adjusted:
            is_empty = adjust(logits, adjusted)
            info = without_adjustments(forward_batch.sampling_info, batch.reqs)
            forward_batch.sampling_info = info
        tokens = self.runner.sample(result.logits_output, forward_batch)
        tokens = broadcast(mark_faults(tokens, is_bad, is_empty))
        result.next_token_ids = tokens.clamp(min=0)
        return PrefillForward(result, HostCopy(tokens))

    def graphs_of(self, batch: ForwardBatch) -> Any:
        """The smallest ``PassGraphs`` that run a causal forward, if any do."""
        return next((one for one in self.pass_graphs if one.fits(batch)), None)

    def decode(
        self, batch: ScheduleBatch, indices: Sequence[int], last_ids: torch.Tensor | None = None
    ) -> ModelRunnerOutput:
        """Runs an ordinary decode forward of some requests.

        Args:
            indices: [n] which of its requests.
            last_ids: int64 [n] their last output tokens, while only the device has them.

        Returns:
            SGLang's output: logits [n, vocab] and, if captured, hidden states [n, width].
        """
        forward_batch = ForwardBatch.init_new(
            _decode_view(batch, indices, last_ids),
            self.runner,
            capture_hidden_mode=_capture_mode([batch.reqs[i] for i in indices]),
            return_hidden_states_before_norm=False,
        )
        return self.runner.forward(forward_batch)


def _is_text(batch: ScheduleBatch, forward_batch: ForwardBatch) -> bool:
    """Whether a prefill reads tokens alone, and no KV that is still on its way from the host."""
    embeds = forward_batch.input_embeds, forward_batch.replace_embeds
    is_embedded = forward_batch.contains_mm_inputs() or any(part is not None for part in embeds)
    return not is_embedded and batch.hicache_consumer_index < 0


def _capture_mode(reqs: Sequence[Req]) -> CaptureHiddenMode | None:
    return CaptureHiddenMode.FULL if needs_hidden_states(reqs) else None


def _decode_view(
    batch: ScheduleBatch, indices: Sequence[int], last_ids: torch.Tensor | None
) -> ScheduleBatch:
    states = [batch.reqs[i].parse_state for i in indices]
    lengths = [state.committed_len + 1 for state in states]
    ids = [state.output_ids[-1] for state in states] if last_ids is None else last_ids
    view = select_requests(batch, indices, lengths, ids)
    table = batch.req_to_token_pool.req_to_token
    view.out_cache_loc = table[view.req_pool_indices, view.seq_lens - 1].to(torch.int64)
    view.forward_mode = ForwardMode.DECODE
    view.spec_info = None
    return view
