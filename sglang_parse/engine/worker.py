"""PARSE's worker: what SGLang's scheduler asks of a speculative worker.

Prefills are run and read here; what a decode iteration does is ``iteration``'s.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from sglang_parse.attention import registry
from sglang_parse.attention.spec_input import ParseDraftInput
from sglang_parse.attention.support import MASK
from sglang_parse.core.config import RequestOptions
from sglang_parse.core.payoff import OffSwitch
from sglang_parse.core.request import Phase, RequestState
from sglang_parse.engine.draft import DraftModel
from sglang_parse.engine.faults import DraftGuard, end_request
from sglang_parse.engine.guarded_head import GuardedHead
from sglang_parse.engine.head import Eagle3Head
from sglang_parse.engine.iteration import Iteration, Kit
from sglang_parse.engine.kv import server_config
from sglang_parse.engine.overlap import pipeline
from sglang_parse.engine.rounds import RoundJudge
from sglang_parse.engine.target import PlainTarget
from sglang_parse.startup import checks, fallback
from sglang_parse.telemetry.metrics import process_tally

logger = logging.getLogger(__name__)


class ParseWorker(BaseSpecWorker):
    """Created by the scheduler in place of a built-in speculative worker."""

    def __init__(
        self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: TpModelWorker
    ) -> None:
        super().__init__()
        registry.register_backends()
        self.config = server_config()
        layout, why = checks.pass_layout(server_args, self.config)
        logger.info(
            "PARSE: verification passes run in the layout '%s' on %s: %s",
            *(layout, server_args.attention_backend, why),
        )
        self._target_worker = target_worker
        self._draft_worker = DraftModel(server_args, gpu_id, nccl_port, target_worker)
        self.target = PlainTarget(target_worker, capture=self.config.uses_eagle3)
        head = None
        if self.config.uses_eagle3:
            path = self.config.eagle3_path
            head = Eagle3Head(server_args, gpu_id, nccl_port, target_worker, path)
        self.switch = OffSwitch(self.config.drafting)
        self.judge = RoundJudge(self.config, *_tokenizer_and_question(target_worker), self.switch)
        self._draft_guard = DraftGuard(num_ranks=server_args.tp_size)
        self._head = GuardedHead(head, num_ranks=server_args.tp_size)
        self._running: dict[str, Any] = {}
        self.tally = process_tally()
        self.pipeline = pipeline()
        self._kit = Kit(
            config=self.config,
            target=self.target,
            draft=self._draft_worker,
            draft_guard=self._draft_guard,
            head=self._head,
            judge=self.judge,
            switch=self.switch,
            tally=self.tally,
            pipeline=self.pipeline,
            is_masked=layout == MASK,
        )

    # -- one iteration ----------------------------------------------------------

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, **kwargs: Any
    ) -> GenerationBatchResult:
        """Advance every request of ``batch`` by one step.

        Args:
            batch: SGLang's ``ScheduleBatch``, isolated: what must outlive the call goes into
                the result or the requests' states.
            on_publish: for the overlap relay; PARSE's knows the lengths without (``relay``).
        """
        del on_publish
        self.tally.launched(batch.reqs, overlap=batch.enable_overlap)
        self.pipeline.forward_stream = torch.get_device_module(batch.device).current_stream()
        if batch.forward_mode.is_extend():
            return self._prefill(batch, **kwargs)
        return self._decode(batch)

    def _prefill(self, batch: Any, **kwargs: Any) -> GenerationBatchResult:
        started = time.perf_counter()
        for req in batch.reqs:
            self._admit(req)
        result = self.target.prefill(batch, **kwargs)
        with self._draft_guard.contain(batch.reqs):
            self._draft_worker.prefill(batch)
        for req, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
            req.parse_state.restart(length, req.output_ids)
        self._head.prefill(batch, result)
        share = (time.perf_counter() - started) * 1e3 / len(batch.reqs)
        self.switch.num_running = len(self._running.keys() | {req.rid for req in batch.reqs})
        first_ids = [None] * len(batch.reqs)
        if not batch.is_prefill_only:
            first_ids = result.next_token_ids.tolist()
        for req, first_id in zip(batch.reqs, first_ids, strict=True):
            state: RequestState = req.parse_state
            state.stats.prefill_ms += share
            if state.fault:
                end_request(req, state.fault)
            elif req is not batch.chunked_req:
                self.judge.start(req)
                state.output_ids.extend([] if first_id is None else [first_id])
        result.next_draft_input = ParseDraftInput()
        result.new_seq_lens = batch.seq_lens
        return result

    def _admit(self, req: Any) -> None:
        """Decide once, at prefill, how a request is served."""
        if getattr(req, "parse_state", None) is not None:
            return
        options = RequestOptions.read(req.sampling_params.custom_params, self.config)
        wish = fallback.special_wish(req)
        req.parse_state = RequestState(
            phase=Phase.DRAFTING,
            threshold=options.threshold,
            keep_trace=options.trace,
            plain_reason=fallback.plain_reason(wish, options),
            continuation=fallback.continuation(wish, self.config),
            steps_unread=not wish,
        )

    def _decode(self, batch: Any) -> GenerationBatchResult:
        self._running = {req.rid: req for req in batch.reqs}
        self.switch.num_running = len(batch.reqs)
        self.tally.hold(batch.reqs)
        iteration = Iteration(self._kit, batch)
        iteration.launch()
        self.pipeline.add(iteration)
        if not batch.enable_overlap:
            self.pipeline.settle()
        return iteration.result

    # -- what else the scheduler asks for ---------------------------------------

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        pools = {
            "memory_pool_config": memory_pool_config,
            "req_to_token_pool": req_to_token_pool,
            "token_to_kv_pool_allocator": token_to_kv_pool_allocator,
        }
        super().alloc_memory_pool(**pools)
        self._head.alloc_memory_pool(**pools)

    def init_attention_backends(self) -> None:
        """After all models have theirs: a target that ignores the layout would judge wrongly."""
        super().init_attention_backends()
        self._head.init_attention_backends()
        registry.assert_used(self.target.runner)

    def init_cuda_graphs(self) -> None:
        super().init_cuda_graphs()
        self._head.init_cuda_graphs()

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """Complete the draft's KV before the radix cache takes a finished request's tokens.

        Without it the next turn drafts from garbage: right text, but nothing is accepted.
        """
        del natural_stop
        req = self._running.pop(rid, None)
        if req is not None and not req.parse_state.fault:
            self.pipeline.order_behind_forward(self.target.runner.device)
            with self._draft_guard.contain([req]):
                self._draft_worker.fill(req, req.owned_kv_len())


def _tokenizer_and_question(target_worker: TpModelWorker) -> tuple[Any, Any]:
    tokenizer = target_worker.tokenizer
    if tokenizer is None:
        tokenizer = get_tokenizer(target_worker.server_args.tokenizer_path)
    question = checks.question_for(target_worker.server_args, tokenizer, server_config())
    return tokenizer, question
