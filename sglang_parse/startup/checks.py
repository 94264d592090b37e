"""Start-up checks of a server's settings, before a model is loaded.

``validate_server_args`` runs in the launcher, where its errors reach the user unchanged.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.utils import is_confidential_compute
from sglang.srt.utils.network import try_bind_socket

from sglang_parse.attention.support import check_backends, choose_layout
from sglang_parse.core.block import Masks, lookahead_rows
from sglang_parse.core.config import ParseConfig, flag
from sglang_parse.core.question import Question
from sglang_parse.core.simulation import SimulatedAcceptance
from sglang_parse.startup import compat
from sglang_parse.startup.judges import check_judge
from sglang_parse.startup.models import (
    DRAFT,
    check_head,
    check_models,
    flag_of,
    parallel_draft,
    refuse,
    require,
    tokenizer_of,
)
from sglang_parse.startup.questions import question_for
from sglang_parse.telemetry.prometheus import with_parse_metrics

logger = logging.getLogger(__name__)

_NOT_PARSES = "leave it out: a setting of SGLang's own algorithms"
_ALLOWED: dict[str, tuple[tuple[Any, ...], str]] = {
    "pp_size": ((1,), "PARSE runs without pipeline parallelism"),
    "enable_dp_attention": ((False,), "PARSE runs without DP attention"),
    "attn_cp_size": ((1,), "PARSE runs without context parallelism"),
    "dcp_size": ((1,), "PARSE runs without context parallelism"),
    "disaggregation_mode": (("null", None), "PARSE runs prefill and decode in one server"),
    "enable_return_hidden_states": ((False,), "PARSE returns no hidden states"),
    "enable_beam_search": ((False,), "PARSE runs without beam search"),
    "enable_pdmux": ((False,), "PARSE runs prefill and decode one after the other"),
    "enable_two_batch_overlap": ((False,), "PARSE's batches are not split in two"),
    # With these SGLang pads every forward to token counts that verify passes do not have.
    "enable_waterfill": ((False,), "leave it out: it brings an all-to-all backend"),
    "moe_a2a_backend": (("none", None), "leave it out, or use none"),
    "moe_dense_tp_size": ((None,), "leave it out: dense layers are sharded as all others"),
    # Any other value would be ignored, or reach an EAGLE-3 head.
    "enable_multi_layer_eagle": ((False,), _NOT_PARSES),
    "speculative_accept_threshold_acc": ((1.0,), _NOT_PARSES),
    "speculative_accept_threshold_single": ((1.0,), _NOT_PARSES),
    "speculative_adaptive": ((False,), _NOT_PARSES),
    "speculative_draft_sink_size": ((None,), _NOT_PARSES),
    "speculative_draft_window_size": ((None,), _NOT_PARSES),
    "speculative_token_map": ((None,), _NOT_PARSES),
    "speculative_use_block_verification": ((False,), _NOT_PARSES),
    "speculative_use_rejection_sampling": ((False,), _NOT_PARSES),
}
"""SGLang's settings -> (the supported values, the fix for others)."""

GRAPHS_OF_STEPS = ("fa3", "triton", "torch_native")
"""Attention backends that plan several steps without reading lengths on the host in between. On a
CPU, without graphs, the steps run one by one."""


def validate_server_args(server_args: Any) -> None:
    """Checks a server's settings and models, then sets the fields that PARSE determines.

    Args:
        server_args: SGLang's view of ``ServerArgs``; assignments become declared overrides.

    Raises:
        AdmissionError, BackendError, ConfigError, QuestionError, CompatError: with setting, value
            and fix.
    """
    config = ParseConfig.from_env()
    SimulatedAcceptance.from_env(config)
    check_settings(server_args)
    pass_layout(server_args, config)
    check_draft_graphs(server_args, config)
    compat.check_backend(server_args.attention_backend)
    tokenizer = tokenizer_of(server_args)
    target, draft = check_models(server_args, tokenizer)
    block = parallel_draft(config, draft)
    num_steps = check_head(server_args, config, target) if config.uses_eagle3 else 1
    question = question_for(server_args, tokenizer, config)
    check_judge(server_args, config, target)
    if draft is None:
        logger.info("PARSE: no draft model (%s): drafts are texts only", DRAFT)
    server_args.disable_overlap_schedule = not overlaps(server_args, config)
    # The most rows of a draft forward: last committed token, draft and masks.
    draft_rows = 1 + config.draft_tokens + lookahead_rows(block.size, Masks.EVERY)
    # Sets the width of each ``req_to_token`` row (4 bytes a column); slots are allocated by phase.
    server_args.speculative_num_draft_tokens = max(longest_pass(config, question), draft_rows)
    server_args.speculative_num_steps = num_steps
    server_args.speculative_eagle_topk = 1
    server_args.stat_loggers = with_parse_metrics(server_args.stat_loggers)


def check_settings(args: Any) -> None:
    """Raises AdmissionError or BackendError for the first unsupported setting of SGLang."""
    phases = ("prefill", "decode", "speculative_draft")
    names = [f"{phase}_attention_backend" for phase in phases]
    others = {flag_of(name): getattr(args, name, None) for name in names}
    check_backends(args.device, args.attention_backend, others)
    # With these it would run verify passes in unplanned kernels.
    is_wrong = args.attention_backend == "triton" and args.enable_deterministic_inference
    where, fix = "--enable-deterministic-inference with triton", "use flashinfer or fa3 with it"
    require(not is_wrong, where, True, fix)
    dtype = args.kv_cache_dtype
    where, fix = "--kv-cache-dtype with fa3", "leave it out, or use flashinfer or triton with it"
    require(args.attention_backend != "fa3" or not dtype.startswith("fp8"), where, dtype, fix)
    # Attention inside a full graph supports neither masks nor pseudo-sequences.
    graphs, fix = args.cuda_graph_config.prefill.backend, f"use {Backend.BREAKABLE}"
    require(graphs != Backend.FULL, "--cuda-graph-backend-prefill", graphs, fix)
    sizing = envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING
    fix = "set it to 0: it sizes the KV pool without the draft model's KV"
    require(not sizing.get(), sizing.name, sizing.get(), fix)
    for name, (allowed, fix) in _ALLOWED.items():
        value = getattr(args, name, allowed[0])
        require(value in allowed, flag_of(name), value, fix)


def check_port(args: Any) -> None:
    """Raises AdmissionError if the server could not listen; SGLang binds after loading."""
    try:
        try_bind_socket(args.host, args.port).close()
    except OSError:
        where = f"{args.port}, on which --host {args.host} cannot listen (in use?)"
        refuse("--port", where, "use a free port, or stop the other server")


def check_draft_graphs(args: Any, config: ParseConfig) -> None:
    """Raises AdmissionError if several draft steps cannot be one CUDA graph."""
    if not (steps := config.draft_graph_steps):
        return
    setting, model = flag("draft_graph_steps"), args.speculative_draft_model_path
    require(model, f"{setting} without {DRAFT}", steps, "leave it out, or give a draft model")
    fix, backend = "leave it out", args.attention_backend
    where = f"{setting} with --attention-backend {backend}"
    require(backend in GRAPHS_OF_STEPS, where, steps, f"{fix}, or use fa3 or triton")
    # Rank 0 broadcasts its choice at every step, which is untested inside a graph.
    require(args.tp_size == 1, f"{setting} with --tp-size {args.tp_size}", steps, fix)
    has_graphs = args.cuda_graph_config.decode.backend != Backend.DISABLED
    require(args.device == "cpu" or has_graphs, f"{setting} without CUDA graphs", steps, fix)


def longest_pass(config: ParseConfig, question: Question | None) -> int:
    """Returns the most rows of a verify pass: last committed token, draft and questions."""
    question_len = 0 if question is None else question.max_len
    return 1 + config.draft_tokens + config.max_questions * question_len


def pass_layout(args: Any, config: ParseConfig) -> tuple[str, str]:
    """Returns the layout of a server's verify passes, and the reason."""
    return choose_layout(config.layout, args.attention_backend, args.page_size or 1)


def overlaps(args: Any, config: ParseConfig) -> bool:
    """Returns whether a server uses the overlap schedule.

    On a CPU a launch returns when the iteration is complete: overlap would only delay results by
    one iteration.
    """
    if config.overlap == "off":
        return False
    # There SGLang waits for results in a separate thread, which would not wait for PARSE's.
    is_confidential = is_confidential_compute()
    if config.overlap == "auto":
        return args.device != "cpu" and not args.disable_overlap_schedule and not is_confidential
    fix = f"leave it out, or use {flag('overlap')} auto"
    require(not args.disable_overlap_schedule, "--disable-overlap-schedule", True, fix)
    fix = "use auto: not with NVIDIA Confidential Computing"
    require(not is_confidential, flag("overlap"), "on", fix)
    return True
