"""Several steps of the draft model at once: each one's best token is the next one's input.

On a GPU they are one CUDA graph, captured and replayed by the runner SGLang has for its own
drafts: between two of its steps the host does nothing. Attention is SGLang's too, a backend per
step, so that each step's plan is made before the first runs. On a CPU, where SGLang captures no
graphs, the same steps run one by one.

Off unless ``--parse-draft-graph-steps`` says how many: no GPU has shown yet that it pays.
"""

from __future__ import annotations

from collections.abc import Iterator
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


class DraftChain:
    """The draft model's steps in chains of ``num_steps``.

    For SGLang's ``EAGLEDraftCudaGraphRunner`` it is the draft worker: that reads ``draft_runner``,
    ``speculative_num_steps`` and ``seed_dsa_topk_from_draft_extend``, and calls ``draft_forward``.

    Args:
        runner: the draft model's; its attention backends and its own graphs are there.
        num_steps: of one chain, at least 1.
    """

    seed_dsa_topk_from_draft_extend = False

    def __init__(self, runner: Any, num_steps: int) -> None:
        self.draft_runner = runner
        self.num_steps = num_steps
        # SGLang counts the token a draft begins with, which takes no forward.
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
        """Whether a chain of so many requests can be run."""
        return self.graphs is None or num_reqs <= self.graphs.max_bs

    def run(
        self,
        ids: torch.Tensor,
        *,
        rows: torch.Tensor,
        positions: torch.Tensor,
        positions_cpu: torch.Tensor,
        positions_sum: int,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """The next ``num_steps`` tokens of some requests.

        Args:
            ids: int64 [n] their last tokens.
            rows: int64 [n] their rows of ``req_to_token``.
            positions: int64 [n] where ``ids`` stand.
            positions_cpu, positions_sum: the same on the host, and their sum.
            slots: int64 [num_steps, n] where each step's KV is written.

        Returns:
            int64 [n, num_steps], ``broadcast.NO_TOKEN`` where a step's logits held a NaN; in memory
            of its own.
        """
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(ids),
            input_ids=None,
            req_pool_indices=rows,
            # Those of the committed tokens: SGLang's backends add the steps themselves.
            seq_lens=positions,
            seq_lens_cpu=positions_cpu,
            seq_lens_sum=positions_sum,
            orig_seq_lens=positions.to(torch.int32),
            # A column more: as long as SGLang counts. Nothing is written there.
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

    def draft_forward(self, forward_batch: Any) -> tuple[None, None, torch.Tensor, None]:
        """The steps, in a capture or one by one. Source: ``EagleDraftWorker.draft_forward``."""
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
            chosen.append(best_tokens(output.next_token_logits))
            ids = chosen[-1].clamp(min=0)
            forward_batch.positions.add_(1)
        return None, None, torch.stack(chosen, dim=1), None

    @contextmanager
    def _as_standalone(self) -> Iterator[None]:
        """The draft model as SGLang finds its own: without hidden states to hand on, or graphs of
        single steps, which a capture would try to replay; and without the memory that attention
        backends take for as many tokens at once as PARSE's passes have rows."""
        runner = self.draft_runner
        before = runner.spec_algorithm, runner.decode_cuda_graph_runner
        nothing = {"speculative_num_draft_tokens": None, "max_speculative_num_draft_tokens": None}
        runner.spec_algorithm = SpeculativeAlgorithm.STANDALONE
        runner.decode_cuda_graph_runner = None
        try:
            with get_spec().override(**nothing):
                yield
        finally:
            runner.spec_algorithm, runner.decode_cuda_graph_runner = before


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """int64 [n] the best of logits [n, vocab], ``broadcast.NO_TOKEN`` where they hold a NaN."""
    is_bad = nan_rows(logits)
    return broadcast_tokens(logits.argmax(dim=-1), is_bad)
