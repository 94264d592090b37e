"""Several decode steps of the draft model in one CUDA graph.

Each step's most likely token is the next one's input, and the host does nothing in between. The
graphs are captured and replayed by the runner that SGLang has for its own EAGLE drafts, with one
attention backend per step, so that every step's plan is made before the first one runs. On a CPU,
where SGLang captures no graphs, the same steps run one by one.

Off unless ``--parse-draft-graph-steps`` is given: no GPU has shown yet that it pays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from sglang.srt.speculative.eagle_draft_cuda_graph_runner import EAGLEDraftCudaGraphRunner
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_utils import per_step_draft_out_cache_loc
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_parse.engine.broadcast import broadcast_tokens
from sglang_parse.engine.faults import nan_rows


class StepGraphs:
    """CUDA graphs of ``num_steps`` decode steps.

    SGLang's ``EAGLEDraftCudaGraphRunner`` takes it for the draft worker: it reads ``draft_runner``,
    ``speculative_num_steps`` and ``seed_dsa_topk_from_draft_extend``, and calls ``draft_forward``.

    Args:
        runner: the draft model's runner; its attention backends and its own graphs exist.
        num_steps: decode steps per graph, at least 1.
    """

    seed_dsa_topk_from_draft_extend = False

    def __init__(self, runner: Any, num_steps: int) -> None:
        self.draft_runner = runner
        self.num_steps = num_steps
        # SGLang counts the first token of a draft, too, which takes no forward.
        self.speculative_num_steps = num_steps + 1
        with self._as_standalone():
            factory = DraftBackendFactory(runner, 1, self.speculative_num_steps)
            self.backend = factory.create_decode_backend()
            self.graphs = None
            if runner.device != "cpu":
                self.graphs = EAGLEDraftCudaGraphRunner(
                    self,
                    draft_attn_backend=self.backend,
                    speculative_num_steps=self.speculative_num_steps,
                )

    def fits(self, num_reqs: int) -> bool:
        """Whether a graph was captured for so many requests."""
        return self.graphs is None or num_reqs <= self.graphs.max_bs

    def run(
        self,
        ids: torch.Tensor,
        *,
        pools: torch.Tensor,
        positions: torch.Tensor,
        positions_cpu: Sequence[int],
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """Decodes the next ``num_steps`` tokens of some requests.

        Args:
            ids: int64 [n] their last tokens.
            pools: int64 [n] their rows of ``req_to_token``.
            positions, positions_cpu: int64 [n] of ``ids``.
            slots: int64 [num_steps, n] where each step writes its KV.

        Returns:
            int64 [n, num_steps], ``NO_TOKEN`` where a step's logits held a NaN; in memory of its
            own.
        """
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(ids),
            input_ids=None,
            req_pool_indices=pools,
            # Without the steps: SGLang's backends add those themselves.
            seq_lens=positions,
            seq_lens_cpu=torch.tensor(positions_cpu),
            seq_lens_sum=sum(positions_cpu),
            orig_seq_lens=positions.to(torch.int32),
            # One column more, as SGLang counts; nothing is written there.
            out_cache_loc=torch.nn.functional.pad(slots.t(), (0, 1)).flatten(),
            positions=positions.clone(),
            spec_algorithm=self.draft_runner.spec_algorithm,
            spec_info=EagleDraftInput(
                topk_p=torch.ones_like(ids[:, None], dtype=torch.float32),
                topk_index=ids[:, None],
                capture_hidden_mode=CaptureHiddenMode.NULL,
            ),
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_logprob=False,
        )
        self.draft_runner.kv_index_translator.bind_own_plan(forward_batch)
        if self.graphs is not None:
            *_, tokens, _ = self.graphs.execute(forward_batch)
            return tokens.clone()  # the next replay writes there
        with self._as_standalone():
            self.backend.init_forward_metadata(forward_batch)
            forward_batch.mark_forward_metadata_ready()
            *_, tokens, _ = self.draft_forward(forward_batch)
        return tokens

    def draft_forward(self, forward_batch: ForwardBatch) -> tuple[None, None, torch.Tensor, None]:
        """Runs the steps, in a capture or one by one.

        Source: ``EagleDraftWorker.draft_forward``.
        """
        num_reqs, num_steps = forward_batch.batch_size, self.speculative_num_steps
        slots = per_step_draft_out_cache_loc(forward_batch.out_cache_loc, num_reqs, 1, num_steps)
        ids = forward_batch.spec_info.topk_index.flatten()
        chosen = []
        for step, backend in enumerate(self.backend.attn_backends):
            forward_batch.input_ids = ids
            forward_batch.out_cache_loc = slots[step]
            context = ForwardContext(attn_backend=backend)
            with forward_context(context, forward_batch=forward_batch):
                output = self.draft_runner.forward(forward_batch).logits_output
            is_bad = nan_rows(output.next_token_logits)
            chosen.append(broadcast_tokens(output.next_token_logits.argmax(dim=-1), is_bad))
            ids = chosen[-1].clamp(min=0)
            forward_batch.positions.add_(1)
        return None, None, torch.stack(chosen, dim=1), None

    @contextmanager
    def _as_standalone(self) -> Iterator[None]:
        """Makes the draft model look like one of SGLang's own: without hidden states, without
        graphs of single steps, which a capture would try to replay, and without memory of attention
        backends for as many tokens per request as PARSE's verify passes have rows."""
        runner = self.draft_runner
        before = runner.spec_algorithm, runner.decode_cuda_graph_runner
        unset = {"speculative_num_draft_tokens": None, "max_speculative_num_draft_tokens": None}
        runner.spec_algorithm = SpeculativeAlgorithm.STANDALONE
        runner.decode_cuda_graph_runner = None
        try:
            with get_spec().override(**unset):
                yield
        finally:
            runner.spec_algorithm, runner.decode_cuda_graph_runner = before
