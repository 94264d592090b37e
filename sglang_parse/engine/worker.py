"""PARSE's speculative worker: what SGLang's scheduler calls."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.model_runner import SamplingPrewarmResult
from sglang.srt.runtime_context import get_memory
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from sglang_parse.attention import registry
from sglang_parse.attention.support import check_kv
from sglang_parse.context import process_context
from sglang_parse.core.config import ParseConfig
from sglang_parse.engine import admission, pass_graphs, step_graphs
from sglang_parse.engine.build import build_engine
from sglang_parse.engine.faults import contain_request
from sglang_parse.engine.graph_memory import GraphMemory
from sglang_parse.engine.logits.grammar import needs_matchers
from sglang_parse.engine.overlap import Pipeline
from sglang_parse.engine.prefill import prefill
from sglang_parse.engine.prewarm import prewarm
from sglang_parse.engine.sglang_types import Req, ScheduleBatch
from sglang_parse.engine.states import keeper_of

logger = logging.getLogger(__name__)


class ParseWorker(BaseSpecWorker):
    """Takes the place of a built-in speculative worker.

    Attributes:
        pipeline: the iterations in flight; patches find it in ``context``.
    """

    def __init__(
        self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: TpModelWorker
    ) -> None:
        super().__init__()
        context = process_context()
        models = (server_args, gpu_id, nccl_port, target_worker)
        self.engine = build_engine(ParseConfig.from_env(), context.counters, *models)
        self.pipeline = context.pipeline = Pipeline(self.engine)
        self._args, self._target_worker = resolved_view(server_args), target_worker
        self._draft_worker = self.engine.drafter.model if self.engine.drafter else None
        self._running: dict[int, Req] = {}  # by id(): several clients may give one rid
        self._forward_stream: Any = None

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Any = None,
        grammar_barrier: Callable[[], None] | None = None,
        **kwargs: Any,
    ) -> GenerationBatchResult:
        """Advances every request of ``batch`` by one iteration.

        Args:
            batch: SGLang's ``ScheduleBatch``, isolated: only the result and the requests' states
                outlive the call.
            on_publish: of SGLang's future map, which PARSE does not need.
            grammar_barrier: under overlap: SGLang's matchers accept what is not processed yet.
        """
        del on_publish
        engine, is_prefill = self.engine, batch.forward_mode.is_extend()
        engine.counters.record_launch(batch.reqs, overlap=batch.enable_overlap)
        if engine.drafter is not None:
            engine.drafter.model.kv.unmark_allocated()
        self._forward_stream = torch.get_device_module(batch.device).current_stream()
        if not is_prefill:
            self._running = {id(req): req for req in batch.reqs}
        engine.controller.num_running = len(self._running.keys() | set(map(id, batch.reqs)))
        if is_prefill:
            return prefill(engine, batch, **kwargs)
        engine.counters.sample_kv_slots(batch.reqs)
        if grammar_barrier is not None and needs_matchers(batch.reqs):
            grammar_barrier()
        return self.pipeline.launch(batch)

    def alloc_memory_pool(self, **pools: Any) -> None:
        super().alloc_memory_pool(**pools)
        states = self.engine.verifier.states = keeper_of(self.engine.verifier.target)
        self.engine.schedule.max_verified = states.num_copies if states else 0
        self.engine.committer.compares_candidates &= states is None
        if self.engine.eagle is not None:
            self.engine.eagle.alloc_memory_pool(**pools)

    def init_hicache_draft_plan(self) -> None:
        """Keeps SGLang's plan without a draft: the draft model prefills what it lacks, and its KV
        from the host could arrive behind that."""

    def init_attention_backends(self) -> None:
        """Also checks that each model's backend respects PARSE's layout."""
        super().init_attention_backends()
        if self.engine.eagle is not None:
            self.engine.eagle.init_attention_backends()
        registry.assert_used(self.engine.verifier.target.runner, self.engine.layout)
        if self.engine.drafter is not None and self.engine.schedule.block_size > 1:
            runner = self.engine.drafter.model.draft_runner
            registry.assert_used(runner, self.engine.layout, "draft")
            check_kv(runner.prefill_attention_backend_str, runner.kv_cache_dtype, "draft")

    def init_cuda_graphs(self) -> None:
        free = _free_bytes()
        super().init_cuda_graphs()
        if self.engine.eagle is not None:
            self.engine.eagle.init_cuda_graphs()
        target = self.engine.verifier.target
        target.pass_graphs = pass_graphs.capture(target.runner)
        target.step_graphs = [] if target.pass_graphs else step_graphs.capture(target.runner)
        if free:
            taken = (free - _free_bytes()) / 2**30
            text = "PARSE: CUDA graphs of the draft model and of passes take %.2f GB; %.2f computed"
            logger.info(text, taken, sum(self._graph_bytes().values()) / 2**30)

    def _graph_bytes(self) -> dict[str, int]:
        drafter, target = self.engine.drafter, self.engine.verifier.target.runner.model_config
        draft = drafter.model.draft_runner.model_config if drafter else None
        return GraphMemory(self._args, self.engine.config, target, draft).of_graphs()

    def prewarm_sampling(self) -> SamplingPrewarmResult:
        """Called on the forward stream when all graphs are captured."""
        prewarm(self.engine)
        return super().prewarm_sampling()

    @property
    def primary_draft_kv_pool(self) -> None:
        """None for PD disaggregation: no draft KV is transferred, and the draft model prefills."""

    def clear_cache_pool(self) -> None:
        """The prefix cache is flushed, and with it what requests have written."""
        super().clear_cache_pool()
        self.engine.sources.flush()

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """Marks the request's draft KV before the radix cache takes its tokens."""
        del natural_stop
        ended = (r for r in self._running.values() if r.rid == rid and r.finished())
        req = next(ended, None)
        if req is None:
            return
        del self._running[id(req)]
        state = req.parse_state
        if self.engine.verifier.states and req.owned_kv_len() != state.committed - state.state_lag:
            req.skip_radix_cache_insert = True  # its state belongs to other tokens than its KV
        with contain_request(None, "keeping an answer"):
            admission.finish(self.engine, req)
        if self.engine.drafter is None or get_memory().disable_radix_cache:
            return
        if self._forward_stream is not None:  # the marks wait for the forwards in flight
            device = self.engine.verifier.target.runner.device
            torch.get_device_module(device).current_stream().wait_stream(self._forward_stream)
        self.engine.drafter.model.kv.settle(req, req.owned_kv_len())


def _free_bytes() -> int:
    """Of the GPU; 0 without one."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
