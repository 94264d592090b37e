"""PARSE's worker: what SGLang's scheduler asks of a speculative worker, handed to who does it.

Prefills are ``prefill``'s, decode iterations ``overlap.Pipeline``'s.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import get_memory
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from sglang_parse.attention import registry
from sglang_parse.attention.support import MASK, SUPPORT, check_kv
from sglang_parse.context import process_context
from sglang_parse.core.config import ParseConfig
from sglang_parse.core.counters import Counters
from sglang_parse.core.phases import Phase
from sglang_parse.core.policy.controller import Controller
from sglang_parse.core.policy.limits import Limits
from sglang_parse.core.policy.threshold_stats import StatsKey, stats_key
from sglang_parse.core.question import Question
from sglang_parse.core.request import RequestState
from sglang_parse.core.simulation import SimulatedAcceptance
from sglang_parse.engine import admission
from sglang_parse.engine.drafting.draft_model import DraftModel
from sglang_parse.engine.drafting.drafter import Drafter
from sglang_parse.engine.faults import DraftGuard
from sglang_parse.engine.head import Eagle3Head, GuardedHead
from sglang_parse.engine.iteration import Engine
from sglang_parse.engine.kv import KvSlots
from sglang_parse.engine.overlap import Pipeline
from sglang_parse.engine.prefill import prefill
from sglang_parse.engine.rounds import Rounds
from sglang_parse.engine.target import PlainTarget
from sglang_parse.engine.verify import Verifier
from sglang_parse.startup import checks
from sglang_parse.startup.certificates import Certified, certified_server
from sglang_parse.startup.models import ParallelDraft, parallel_draft
from sglang_parse.startup.questions import question_for
from sglang_parse.telemetry.drift import DriftWatch

logger = logging.getLogger(__name__)


class ParseWorker(BaseSpecWorker):
    """Created by the scheduler in place of a built-in speculative worker.

    Attributes:
        engine: the parts that do the work.
        pipeline: the iterations under way; SGLang's other ways to it find it in ``context``.
    """

    def __init__(
        self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: TpModelWorker
    ) -> None:
        super().__init__()
        context = process_context()
        models = (server_args, gpu_id, nccl_port, target_worker)
        self.engine = build_engine(ParseConfig.from_env(), context.counters, *models)
        self.pipeline = context.pipeline = Pipeline(self.engine)
        self._target_worker = target_worker
        self._draft_worker = self.engine.draft
        self._running: dict[str, Any] = {}

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, **kwargs: Any
    ) -> GenerationBatchResult:
        """Advance every request of ``batch`` by one step.

        Args:
            batch: SGLang's ``ScheduleBatch``, isolated: what must outlive the call goes into
                the result or the requests' states.
            on_publish: for the overlap relay; PARSE's knows the lengths without.
        """
        del on_publish
        engine = self.engine
        engine.counters.record_launch(batch.reqs, overlap=batch.enable_overlap)
        self.pipeline.forward_stream = torch.get_device_module(batch.device).current_stream()
        if batch.forward_mode.is_extend():
            prefilled = {req.rid for req in batch.reqs}
            num_running = len(self._running.keys() | prefilled)
            engine.controller.observe_load(num_running, [*_resting(self._running.values())])
            engine.closed = None
            return prefill(engine, batch, **kwargs)
        self._running = {req.rid: req for req in batch.reqs}
        engine.controller.observe_load(len(batch.reqs), [*_resting(batch.reqs)])
        engine.counters.observe_kv_slots(batch.reqs)
        return self.pipeline.launch(batch)

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
        self.engine.head.alloc_memory_pool(**pools)

    def init_attention_backends(self) -> None:
        """After all models have theirs: a target that ignores the layout would judge wrongly."""
        super().init_attention_backends()
        self.engine.head.init_attention_backends()
        registry.assert_used(self.engine.target.runner)
        if self.engine.slots.block_size > 1:
            runner = self.engine.draft.draft_runner
            registry.assert_used(runner, "draft")
            check_kv(runner.server_args.attention_backend, runner.kv_cache_dtype, "draft")

    def init_cuda_graphs(self) -> None:
        super().init_cuda_graphs()
        self.engine.head.init_cuda_graphs()

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """What a finished request's steps wrote is learned from. And how far the draft's KV goes is
        marked, before the radix cache takes its tokens: later turns go on from there."""
        del natural_stop
        req = self._running.pop(rid, None)
        if req is None:
            return
        admission.learn(self.engine, req)
        if get_memory().disable_radix_cache:
            return
        self.pipeline.order_behind_forward(self.engine.target.runner.device)
        self.engine.draft.kv.settle(req, req.owned_kv_len())


def _resting(reqs: Iterable[Any]) -> Iterator[StatsKey | None]:
    """The accounts of those that do not draft (see ``Controller.observe_load``)."""
    for req in reqs:
        state: RequestState = req.parse_state
        if state.phase is Phase.PLAIN:
            yield None
        elif state.is_stepping and state.drafting_suspended:
            yield stats_key(state.policy.threshold, state.num_failed)


def build_engine(
    config: ParseConfig,
    counters: Counters,
    server_args: Any,
    gpu_id: int,
    nccl_port: int,
    target_worker: TpModelWorker,
) -> Engine:
    """The parts of a server's engine; loads the draft model and the EAGLE-3 head.

    Args:
        config: the server's settings.
        counters: what is counted in this process.
        server_args, gpu_id, nccl_port, target_worker: SGLang's, see ``BaseSpecWorker``.
    """
    registry.register_backends()
    is_masked = _pass_layout(server_args, config) == MASK
    question, tokenizer = _question(config, target_worker)
    draft = DraftModel(
        server_args, gpu_id, nccl_port, target_worker, graph_steps=config.draft_graph_steps
    )
    block = _parallel_draft(config, draft)
    target = PlainTarget(target_worker)
    head = None
    if config.uses_eagle3:
        head = Eagle3Head(server_args, gpu_id, nccl_port, target_worker, config.eagle3_path)
    controller = _controller(config, server_args, question)
    certified = certified_server(server_args, config, question, str(target.runner.dtype))
    counters.certificate_mismatch = certified.mismatch
    return Engine(
        config=config,
        target=target,
        draft=draft,
        drafter=Drafter(
            draft,
            block_size=block.size,
            mask_id=block.mask_id,
            allow_one_token=block.allow_one_token,
            is_masked=is_masked,
            plans_on_device=SUPPORT[server_args.attention_backend].plans_on_device,
            draft_tokens=config.draft_tokens,
            is_timed=not server_args.enable_deterministic_inference,
        ),
        draft_guard=DraftGuard(num_ranks=server_args.tp_size),
        head=GuardedHead(head, num_ranks=server_args.tp_size),
        verifier=Verifier(target, question, is_masked=is_masked),
        rounds=Rounds(config, tokenizer, question, controller, counters, _drift_watch(certified)),
        slots=KvSlots(config, controller, question.max_len if question else 0, block.size),
        controller=controller,
        counters=counters,
        certified=certified,
    )


def _controller(config: ParseConfig, server_args: Any, question: Question | None) -> Controller:
    """What decides about drafts; by nothing that is timed where answers must be the same again."""
    is_timed, mode = not server_args.enable_deterministic_inference, config.drafting
    if not is_timed and mode == "auto":
        mode = "always"
        logger.info(
            "PARSE: under --enable-deterministic-inference nothing depends on the clock: drafts "
            "are always begun, of %d tokens with %d prefixes, in bursts of %d.",
            *(config.draft_tokens, config.max_prefixes, config.draft_chunk),
        )
    limits = Limits.of(
        config,
        question.max_len if question else 0,
        is_timed=is_timed,
        is_simulated=SimulatedAcceptance.from_env(config) is not None,
    )
    return Controller(limits, mode)


def _drift_watch(certified: Certified) -> DriftWatch | None:
    certificate = certified.certificate
    return DriftWatch(certificate.first_verdicts) if certificate else None


def _pass_layout(server_args: Any, config: ParseConfig) -> str:
    layout, why = checks.pass_layout(server_args, config)
    logger.info(
        "PARSE: verification passes run in the layout '%s' on %s: %s",
        *(layout, server_args.attention_backend, why),
    )
    return layout


def _parallel_draft(config: ParseConfig, draft: DraftModel) -> ParallelDraft:
    block = parallel_draft(config, draft.draft_runner.model_config)
    if block.size > 1:
        logger.info(
            "PARSE: the draft writes up to %d tokens a forward, with mask token %d%s",
            *(
                block.size,
                block.mask_id,
                ", or one where that is faster" if block.allow_one_token else "",
            ),
        )
    return block


def _question(config: ParseConfig, target_worker: TpModelWorker) -> tuple[Question | None, Any]:
    """What passes ask, and the tokenizer it is made of."""
    tokenizer = target_worker.tokenizer
    if tokenizer is None:
        tokenizer = get_tokenizer(target_worker.server_args.tokenizer_path)
    return question_for(target_worker.server_args, tokenizer, config), tokenizer
