"""Builds one server's engine: loads the draft model and a head, and wires the parts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.managers.tp_worker import TpModelWorker

from sglang_parse.attention import registry
from sglang_parse.attention.support import MASK, SUPPORT
from sglang_parse.context import process_context
from sglang_parse.core.block import BlockKind
from sglang_parse.core.config import ParseConfig
from sglang_parse.core.counters import Counters
from sglang_parse.core.policy.controller import Controller
from sglang_parse.core.policy.limits import Limits
from sglang_parse.core.question import Question
from sglang_parse.core.segment import Segmenter
from sglang_parse.core.simulation import BLOCK_ENV_VAR, SimulatedAcceptance, block_tokens
from sglang_parse.engine.broadcast import is_first_rank
from sglang_parse.engine.commit import Committer
from sglang_parse.engine.drafting.draft_model import DraftModel
from sglang_parse.engine.drafting.drafter import Drafter
from sglang_parse.engine.eagle import EagleDecoder
from sglang_parse.engine.eagle_head import EagleHead
from sglang_parse.engine.faults import DraftGuard
from sglang_parse.engine.judge.judge import Judge
from sglang_parse.engine.judge.scorer import CapturedLayers, Scorer
from sglang_parse.engine.parts import Engine
from sglang_parse.engine.schedule import Schedule
from sglang_parse.engine.sources.answers import AnswerSource
from sglang_parse.engine.sources.chain import SourceChain
from sglang_parse.engine.sources.draft_model import DraftModelSource
from sglang_parse.engine.sources.eagle import EagleSource
from sglang_parse.engine.sources.endpoint import EndpointSource
from sglang_parse.engine.sources.endpoint_client import EndpointClient
from sglang_parse.engine.sources.forced import ForcedSource
from sglang_parse.engine.sources.incoming import IncomingTexts, TextEncoder
from sglang_parse.engine.sources.prediction import PredictionSource
from sglang_parse.engine.sources.prompt import PromptSource
from sglang_parse.engine.sources.source import Source
from sglang_parse.engine.sources.text import TextParts
from sglang_parse.engine.target import TargetModel
from sglang_parse.engine.verify import Verifier
from sglang_parse.startup import checks
from sglang_parse.startup.certificates import Certified, certified_server
from sglang_parse.startup.models import num_ids, tokenizer_of
from sglang_parse.startup.parallel import ParallelDraft, parallel_draft
from sglang_parse.startup.questions import question_for
from sglang_parse.telemetry.drift import DriftWatch

logger = logging.getLogger(__name__)


def build_engine(
    config: ParseConfig,
    counters: Counters,
    server_args: Any,
    gpu_id: int,
    nccl_port: int,
    target_worker: TpModelWorker,
) -> Engine:
    """Builds the engine.

    Args:
        server_args, gpu_id, nccl_port, target_worker: see SGLang's ``BaseSpecWorker``.
    """
    registry.register_backends()
    models = (server_args, gpu_id, nccl_port, target_worker)
    args = resolved_view(server_args)
    tokenizer = target_worker.tokenizer or tokenizer_of(args)  # None: --skip-tokenizer-init
    question = question_for(args, tokenizer, config)
    max_question_len = question.max_len if question else 0
    draft, parallel = _draft_model(config, models, args, tokenizer)
    target, guard = TargetModel(target_worker), DraftGuard(args.tp_size)
    layout = _layout(args, config, target.runner.model_config, parallel.size)
    controller = _controller(config, args, max_question_len, parallel.kinds)
    certified = certified_server(args, config, question, str(target.runner.dtype))
    counters.certificate_mismatch, counters.judge = certified.mismatch, config.judge_name
    eagle = EagleDecoder(config, guard, models) if config.proposer else None
    captured = _captured_layers(config, target.runner, eagle)
    judge = _judge(config, question, tokenizer, counters, certified, captured, target)
    drafter = Drafter(draft, controller.blocks, config.draft_tokens) if draft else None
    context_len = target.runner.model_config.context_len
    encoder = TextEncoder(tokenizer, context_len) if is_first_rank() else None
    sources = build_sources(config, controller, judge, counters, encoder, drafter, eagle)
    return Engine(
        config=config,
        drafter=drafter,
        draft_guard=guard,
        eagle=eagle,
        judge=judge,
        verifier=Verifier(target, judge, is_masked=layout == MASK),
        committer=Committer(config, judge, counters, sources),
        schedule=Schedule(config, controller, max_question_len),
        sources=sources,
        controller=controller,
        counters=counters,
        certified=certified,
        layout=layout,
    )


def build_sources(
    config: ParseConfig,
    controller: Controller,
    judge: Judge | None,
    counters: Counters,
    encoder: TextEncoder | None,
    drafter: Drafter | None = None,
    head: EagleHead | None = None,
    client: EndpointClient | None = None,
) -> SourceChain:
    """The sources of drafts, in the order in which they are asked (``sources.source``).

    Args:
        encoder: prepares texts; None on ranks that are told by rank 0.
        client: asks another server on rank 0, instead of its own.
    """
    incoming = IncomingTexts(encoder, counters)
    segments = judge.segments if judge else None
    if segments is not None and segments.rule.kind == "tokens":
        segments = None
    question = judge.question if judge and not config.scores_tokens else None
    parts = TextParts(config, controller, incoming, segments, question.max_len if question else 0)
    sources: list[Source] = [PredictionSource(parts)]
    if config.max_reused_answers:
        sources.append(AnswerSource(parts))
    if config.draft_url:
        if client is None and encoder is not None:
            codec = encoder.decode, encoder.encode_after
            client = EndpointClient(config.draft_url, *codec, config.draft_timeout)
        sources.append(EndpointSource(client, counters, parts))
    sources.append(PromptSource(parts))
    if drafter is not None:
        sources.append(DraftModelSource(controller))
    sources.append(ForcedSource(config, controller))
    if head is not None:
        sources.append(EagleSource(config, controller, head))
    return SourceChain(sources)


def _captured_layers(
    config: ParseConfig, runner: Any, eagle: EagleDecoder | None
) -> CapturedLayers | None:
    """Makes the target capture what a verdict head or a trace reads, beside what an EAGLE-3 head or
    MTP layer does."""
    layers = config.captured_layers
    if not layers:
        return None
    eagle_layers = eagle.layers if eagle and not config.mtp else []
    captured = CapturedLayers.configure(runner, (*layers, *eagle_layers))
    if eagle is not None:
        model = runner.model
        columns = captured.keep_last(model) if config.mtp else captured.columns(eagle_layers)
        eagle.columns = columns.to(runner.device)
    return captured


def _judge(
    config: ParseConfig,
    question: Question | None,
    tokenizer: Any,
    counters: Counters,
    certified: Certified,
    captured: CapturedLayers | None,
    target: TargetModel,
) -> Judge | None:
    if not config.is_semantic:
        return None
    scorer, device = None, target.runner.device
    if config.judge_file:
        scorer = Scorer.load(config.judge, config.judge_file, captured, device)
    elif config.scores_tokens:
        scorer = Scorer.likelihood(device)
    segments = Segmenter(tokenizer, config.segment_rule)
    is_certified, known = bool(certified.certificate), certified.certificate or config.judge_file
    watch = DriftWatch(known.first_verdicts, is_certified=is_certified) if known else None
    return Judge(config, question, scorer, segments, counters, captured, watch)


def _controller(
    config: ParseConfig, server_args: Any, max_question_len: int, kinds: Sequence[BlockKind]
) -> Controller:
    is_timed, mode = not server_args.enable_deterministic_inference, config.drafting
    if not is_timed and mode == "auto":
        mode = "always"
        logger.info(
            "PARSE: deterministic inference: adaptive drafting is disabled; drafts of %d tokens "
            "with up to %d prefixes, %d tokens per iteration.",
            config.draft_tokens,
            config.max_prefixes,
            config.draft_chunk,
        )
    simulated = SimulatedAcceptance.from_env(config)
    fixed_ratio = simulated is not None and not simulated.adapts_len
    limits = Limits.of(config, max_question_len, is_timed=is_timed, fixed_ratio=fixed_ratio)
    return Controller(limits, mode, kinds=kinds if is_timed else kinds[:1])


def _layout(server_args: Any, config: ParseConfig, target: Any, block_size: int) -> str:
    layout, reason = checks.pass_layout(server_args, config, target, block_size)
    logger.info(
        "PARSE: verify passes use the layout '%s' on %s: %s",
        layout,
        server_args.attention_backend,
        reason,
    )
    return layout


def _draft_model(
    config: ParseConfig,
    models: tuple[Any, int, int, TpModelWorker],
    server_args: Any,
    tokenizer: Any,
) -> tuple[DraftModel | None, ParallelDraft]:
    if not server_args.speculative_draft_model_path:
        return None, ParallelDraft()
    context = process_context()
    context.target_rows = models[3].model_runner.model_config.vocab_size
    draft = DraftModel(*models, config.draft_eagle3_path)
    draft.simulated = SimulatedAcceptance.from_env(config)
    if context.draft_rows:
        draft.keep_within(min(context.draft_rows, context.target_rows, num_ids(tokenizer)))
    parallel = parallel_draft(config, draft.draft_runner.model_config)
    draft.mask_id, draft.block_kinds = parallel.mask_id, parallel.kinds
    if parallel.size > 1:
        draft.is_masked = checks.block_layout(server_args, config) == MASK
        draft.plans_on_device = SUPPORT[checks.draft_attention(server_args)].plans_on_device
        logger.info(
            "PARSE: tokens that the draft model writes per forward: %s%s",
            parallel,
            ", or one where that is faster" if parallel.allow_one_token else "",
        )
        if (simulated := block_tokens()) is not None:
            logger.warning(
                "PARSE: simulated blocks (%s=%g): each adds that many of its candidates, whatever "
                "the draft model confirms. For benchmarks only: the drafts are meaningless.",
                BLOCK_ENV_VAR,
                simulated,
            )
    return draft, parallel
