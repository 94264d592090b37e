"""A head that reads a model's hidden states: SGLang's own EAGLE draft worker under PARSE.

It runs an EAGLE-3 head of the target or of the draft model, which reads several layers (EAGLE3), or
the MTP layer of the target's checkpoint, which reads the last one (EAGLE).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.layers.moe.utils import (
    speculative_moe_a2a_backend_context,
    speculative_moe_backend_context,
)
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
    resolve_spec_aux_hidden_state_config,
)
from sglang.srt.runtime_context import get_model, get_spec
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import draft_tp_context

from sglang_parse.context import process_context
from sglang_parse.startup.models import MAIN


class EagleHead:
    """An EAGLE-3 head or MTP layer on the KV slots of the model that it was trained for.

    Args:
        server_args, gpu_id, nccl_port: see SGLang's ``BaseSpecWorker``.
        model_worker: the model's.
        path: the folder of an EAGLE-3 head, or of another checkpoint with an MTP layer; None for
            the model's own MTP layer.
        algorithm: SGLang's for it: EAGLE for an MTP layer.

    Attributes:
        num_steps, num_run: steps of the longest proposal, of the latest one.
    """

    def __init__(
        self,
        server_args: Any,
        gpu_id: int,
        nccl_port: int,
        model_worker: TpModelWorker,
        path: str | None,
        algorithm: SpeculativeAlgorithm = SpeculativeAlgorithm.EAGLE3,
    ) -> None:
        self._path, self.algorithm = path, algorithm
        with self.as_stock():
            # Before the model's attention backends: they configure which layers it captures.
            model_worker.model_runner.spec_aux_config = resolve_spec_aux_hidden_state_config(
                server_args=server_args,
                model_config=model_worker.model_runner.model_config,
                spec_algorithm=algorithm,
                is_draft_worker=False,
            )
            self.worker = EagleDraftWorker(server_args, gpu_id, nccl_port, model_worker)
        self.num_steps = self.num_run = self.worker.speculative_num_steps

    @property
    def runner(self) -> Any:
        return self.worker.draft_runner

    def steps_for(self, num_tokens: int) -> int:
        """Steps of a proposal of so many tokens: a graph has all of them, and in pieces fewer steps
        would cost more."""
        return self.num_steps if self.worker.cuda_graph_runner else max(1, num_tokens)

    @contextmanager
    def as_stock(self) -> Iterator[None]:
        """Overrides SGLang's settings while its EAGLE worker initializes.

        It allocates for the tokens of a proposal, not for those of a draft and its questions.
        """
        proposed, context = get_spec().speculative_num_steps + 1, process_context()
        context.loads_mtp = not self.algorithm.is_eagle3()
        with get_spec().override(
            speculative_algorithm=self.algorithm.name,
            speculative_draft_model_path=self._path or get_model().model_path,
            speculative_draft_model_revision=MAIN if self._path else get_model().revision,
            speculative_num_draft_tokens=proposed,
            max_speculative_num_draft_tokens=proposed,
        ):
            try:
                yield
            finally:
                context.loads_mtp = False

    @contextmanager
    def running_steps(self, num_steps: int) -> Iterator[None]:
        """Proposals have so many tokens: the worker derives one number from the other, and selects
        by both."""
        worker, sizes = self.worker, (self.num_steps, self.num_steps + 1)
        worker.speculative_num_steps, worker.speculative_num_draft_tokens = num_steps, num_steps + 1
        try:
            yield
        finally:
            worker.speculative_num_steps, worker.speculative_num_draft_tokens = sizes

    @contextmanager
    def forward_contexts(self) -> Iterator[None]:
        """The contexts of ``EAGLEWorkerV2.forward_batch_generation``."""
        with (
            draft_tp_context(self.worker.parallel_layout),
            speculative_moe_backend_context(),
            speculative_moe_a2a_backend_context(),
        ):
            yield

    def alloc_memory_pool(self, **pools: Any) -> None:
        with self.as_stock():
            self.worker.alloc_memory_pool(**pools)
