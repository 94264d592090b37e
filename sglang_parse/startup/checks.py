"""Start-up checks of a server's settings, before a model is loaded.

``validate_server_args`` runs in the launcher, where its errors reach the user unchanged.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.arg_groups.fields.spec import Spec
from sglang.srt.environ import envs
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.utils import is_confidential_compute
from sglang.srt.utils.network import try_bind_socket

from sglang_parse.attention.support import (
    ALL_CAUSAL,
    CAUSAL,
    FOR_DRAFTS,
    OF_DRAFT,
    OF_TARGET,
    SUPPORT,
    Attention,
    BackendError,
    check_backends,
    check_device,
    choose_layout,
)
from sglang_parse.core.config import ParseConfig, flag
from sglang_parse.core.question import Question
from sglang_parse.core.simulation import SimulatedAcceptance, block_tokens
from sglang_parse.startup.disaggregation import DECODE, check_decode_server
from sglang_parse.startup.families import Family, attention_of, family_of, usual_drafts
from sglang_parse.startup.heads import PROPOSED_BY, check_head, check_head_fits, unused_mtp
from sglang_parse.startup.judges import check_judge
from sglang_parse.startup.latent import warn_of_expansion
from sglang_parse.startup.models import (
    DRAFT,
    check_models,
    flag_of,
    read_pair,
    refuse,
    require,
    tokenizer_of,
)
from sglang_parse.startup.parallel import parallel_draft
from sglang_parse.startup.questions import question_for
from sglang_parse.startup.states import check_states
from sglang_parse.telemetry.prometheus import with_parse_metrics

logger = logging.getLogger(__name__)

_ALLOWED: dict[str, tuple[tuple[Any, ...], str]] = {
    "is_embedding": ((False,), "start it without PARSE, which speeds up generation"),
    "pp_size": ((1,), "use --tp-size over the same GPUs: PARSE runs no pipeline"),
    "attn_dp_size": (
        (1,),
        "leave it and --enable-dp-attention out: use --tp-size alone, or several servers behind a "
        "router (examples/router)",
    ),
    "attn_cp_size": ((1,), "PARSE runs without context parallelism"),
    "dcp_size": ((1,), "PARSE runs without context parallelism"),
    "enable_prefill_cp": ((False,), "PARSE runs without context parallelism"),
    "moe_dp_size": ((1,), "PARSE runs without data parallelism inside a model"),
    "disaggregation_mode": (
        ("null", None, DECODE),
        "start it without PARSE, which drafts on the decode server",
    ),
    "decoupled_spec_role": (("null",), "PARSE drafts and verifies in one server"),
    "enable_return_hidden_states": ((False,), "PARSE returns no hidden states"),
    "enable_return_routed_experts": ((False,), "PARSE returns no routed experts"),
    "enable_mis": ((False,), "PARSE's attention backends run without multi-item scoring"),
    "prefill_only_disable_kv_cache": ((False,), "start it without PARSE, which needs KV"),
    "dllm_algorithm": ((None,), "start it without PARSE, which drafts token by token"),
    "enable_nvidia_megakernel": ((False,), "PARSE runs SGLang's standard forward"),
    "enable_amd_monokernel": ((False,), "PARSE runs SGLang's standard forward"),
    "rl_on_policy_target": ((None,), "start it without PARSE, whose passes round differently"),
    "enable_pdmux": ((False,), "PARSE runs prefill and decode one after the other"),
    "enable_two_batch_overlap": ((False,), "PARSE's batches are not split in two"),
    # With these SGLang pads every forward to token counts that verify passes do not have.
    "enable_waterfill": ((False,), "leave it out: it brings an all-to-all backend"),
    "moe_a2a_backend": (("none", None), "leave it out, or use none"),
    "speculative_moe_a2a_backend": (("none", None), "leave it out, or use none"),
    "elastic_ep_backend": ((None,), "leave it out: PARSE's ranks stay the same"),
    "moe_dense_tp_size": ((None,), "leave it out: dense layers are sharded as all others"),
}
"""SGLang's settings -> (the supported values, the fix for others)."""

_NOT_WITH_POOLS = (
    *("enable_hierarchical_cache", "enable_unified_memory", "enable_streaming_session"),
    *("enable_session_radix_cache", "radix_cache_backend", "disaggregation_mode"),
)
"""SGLang's settings that are refused where a target has two KV pools."""

_OF_DRAFTS = frozenset(
    f"speculative_{name}"
    for name in (
        *("algorithm", "num_steps", "eagle_topk", "num_draft_tokens"),
        *("draft_model_path", "draft_model_revision", "draft_load_format"),
        *("draft_model_quantization", "draft_kv_cache_dtype", "draft_attention_backend"),
        *("moe_runner_backend", "moe_a2a_backend", "enable_w4a4_mxfp4_megamoe"),
        "boundary_reduction",  # SGLang sets it
    )
) | {"_speculative_draft_quantization_explicitly_set"}
"""SGLang's settings of speculative decoding that apply to PARSE's draft model or head."""


def validate_server_args(server_args: Any) -> None:
    """Checks a server's settings and models, then sets the fields that PARSE determines.

    Args:
        server_args: SGLang's view of ``ServerArgs``; assignments become declared overrides.

    Raises:
        AdmissionError, BackendError, ConfigError, QuestionError: with setting, value and fix.
    """
    config = ParseConfig.from_env()
    SimulatedAcceptance.from_env(config)
    block_tokens()
    check_settings(server_args)
    tokenizer = tokenizer_of(server_args)
    target, draft = check_models(server_args, tokenizer)
    if server_args.disaggregation_mode == DECODE:
        check_decode_server(server_args, config, target)
    block = parallel_draft(config, draft, target)
    if block.size > 1:
        _check_block_draft(server_args, draft, block.has_head)
    if draft is not None:
        _choose_draft_attention(server_args, draft)
    if block.has_head:
        check_draft_head(server_args, config, draft, target.context_len)
    pass_layout(server_args, config, target, block.size)
    _check_pools(server_args, target, draft)
    num_steps = check_head(server_args, config, target)
    if hint := unused_mtp(server_args, config, target):
        logger.info("PARSE: %s", hint)
    question = question_for(server_args, tokenizer, config)
    check_judge(server_args, config, target)
    if draft is None:
        proposer = config.proposer
        others = f" and of the {PROPOSED_BY[proposer][1]}" if proposer else " only"
        text = "PARSE: no draft model (%s): drafts are texts%s%s. What can draft %s"
        copies = " and copies of the prompt" if config.prompt_drafts == "on" else ""
        logger.info(text, DRAFT, copies, others, usual_drafts(target))
    server_args.disable_overlap_schedule = not overlaps(server_args, config)
    # The most rows of a draft forward: last committed token, draft and masks.
    lookahead = max(kind.lookahead_rows for kind in block.kinds)
    draft_rows = 1 + config.draft_tokens + lookahead
    pass_rows = longest_pass(config, question) + block.size - 1  # candidates behind the draft
    # Sets the width of each ``req_to_token`` row (4 bytes a column); slots are allocated by phase.
    server_args.speculative_num_draft_tokens = max(pass_rows, draft_rows)
    server_args.speculative_num_steps = num_steps
    server_args.speculative_eagle_topk = 1
    server_args.stat_loggers = with_parse_metrics(server_args.stat_loggers)
    if server_args.tokenizer_worker_num > 1 and not envs.SGLANG_HTTP_SERVER_APP_PATH.is_set():
        envs.SGLANG_HTTP_SERVER_APP_PATH.set("sglang_parse.startup.tokenizer_worker:app")


def check_draft_head(args: Any, config: ParseConfig, draft: Any, context_len: int) -> None:
    """Raises AdmissionError or BackendError for an EAGLE-3 head that does not fit the draft model,
    or whose steps would be planned from lengths that only the device knows."""
    check_head_fits(args, "draft_eagle3_path", config.draft_eagle3_path, draft, context_len)
    backend, setting = draft_attention(args), flag("draft_eagle3_path")
    able = [name for name, support in SUPPORT.items() if support.plans_on_device]
    found = f"{OF_DRAFT} (or {OF_TARGET}) is {backend!r}, which plans on the host"
    if backend in SUPPORT and backend not in able:
        raise BackendError(found, f"use {' or '.join(able)}, or leave {setting} out")


def _check_block_draft(args: Any, draft: Any, has_head: bool) -> None:
    attention, fix = attention_of(draft), f"use {flag('draft_parallel_tokens')} 1 with it"
    if has_head:
        fix = f"leave {flag('draft_eagle3_path')} out with it"
    path, why = args.speculative_draft_model_path, f"a draft in blocks, with {attention}"
    require(attention is Attention.FULL, DRAFT, path, fix, why=why)


def _check_pools(args: Any, target: Any, draft: Any) -> None:
    """Raises AdmissionError for a setting that two KV pools were not seen to run with, or where one
    pool would hold heads of two shapes."""
    one_pool, others = "disable_hybrid_swa_memory", "windows have other heads than other layers"
    is_alike = not target.is_hybrid_swa_compress
    why, fix = f"the target's {others}", "leave it out"
    require(target.is_hybrid_swa or is_alike, flag_of(one_pool), True, fix, why=why)
    path, why = args.speculative_draft_model_path, f"its {others}, and the target has one KV pool"
    fix = "use a draft model with the same heads in all layers"
    fits = target.is_hybrid_swa or draft is None or not draft.is_hybrid_swa_compress
    require(fits, DRAFT, path, fix, why=why)
    if not target.is_hybrid_swa:
        return
    why, fix = f"the target has {Attention.POOLS}", "leave it out"
    if is_alike:
        fix = f"{fix}, or use {flag_of(one_pool)}: KV in one pool"
    for name in _NOT_WITH_POOLS:
        value = getattr(args, name)
        require(value in (False, None, "null"), flag_of(name), value, fix, why=why)
    early = envs.SGLANG_OPT_RELEASE_PREFILL_SWA
    why = "it counts iterations for tokens, and an iteration that drafts outputs none"
    require(not early.get(), early.name, early.get(), "leave it out", why=why)


def _choose_draft_attention(args: Any, draft: Any) -> None:
    """Gives the draft model an attention backend of its own where the target's would plan each of
    its steps on the host: on an H100 such a step of eight requests took 3.0 instead of 1.9 ms."""
    backend = args.decode_attention_backend or args.attention_backend
    is_slow = backend in SUPPORT and not SUPPORT[backend].plans_on_device
    # Triton is refused with deterministic inference.
    is_set = args.speculative_draft_attention_backend or args.enable_deterministic_inference
    is_fp4, is_full = "fp4" in args.kv_cache_dtype, attention_of(draft) is Attention.FULL
    if is_slow and is_full and not is_set and not is_fp4:
        args.speculative_draft_attention_backend = FOR_DRAFTS
        text = "PARSE: %s %s: %s would plan each step of the draft model on the host"
        logger.info(text, OF_DRAFT, FOR_DRAFTS, backend)


def draft_attention(args: Any) -> str:
    """Returns the draft model's attention backend."""
    return args.speculative_draft_attention_backend or args.attention_backend


def check_resolved(args: Any) -> None:
    """Checks again what SGLang may have changed since ``validate_server_args``."""
    config = ParseConfig.from_env()
    check_settings(args)
    target, draft = read_pair(args)
    check_states(args, target)
    pass_layout(args, config, target, parallel_draft(config, draft).size)
    warn_of_expansion(args, target)


def check_settings(args: Any) -> None:
    """Raises AdmissionError or BackendError for the first unsupported setting of SGLang."""
    others = _backends_of(args, "prefill", "decode", "speculative_draft")
    check_device(args.device, args.attention_backend, others)
    # With these it would run passes and blocks in unplanned kernels.
    is_triton = "triton" in (args.attention_backend, args.speculative_draft_attention_backend)
    is_wrong = is_triton and args.enable_deterministic_inference
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
        value = getattr(args, name)
        require(value in allowed, flag_of(name), value, fix)
    # Any other value would be ignored, or reach a head.
    fix = "leave it out: a setting of SGLang's own algorithms"
    for field in record_fields(Spec):
        value = getattr(args, field.name)
        is_ours = field.name in _OF_DRAFTS or value == field.default
        require(is_ours, flag_of(field.name), value, fix)


def check_port(args: Any) -> None:
    """Raises AdmissionError if the server could not listen; SGLang binds after loading."""
    try:
        try_bind_socket(args.host, args.port).close()
    except OSError:
        fix, why = "use a free port, or stop the other server", f"--host {args.host} cannot listen"
        refuse("--port", args.port, fix, why=f"{why} there (in use?)")


def longest_pass(config: ParseConfig, question: Question | None) -> int:
    """Returns the most rows of a verify pass: last committed token, draft and questions."""
    question_len = 0 if question is None else question.max_len
    return 1 + config.draft_tokens + config.max_questions * question_len


def pass_layout(args: Any, config: ParseConfig, target: Any, block_size: int) -> tuple[str, str]:
    """Returns the layout of a server's verify passes, and the reason.

    Args:
        target: its ``ModelConfig``.
        block_size: tokens per forward of its draft model.

    Raises:
        BackendError: the attention backend cannot run them.
    """
    backend, is_set = args.attention_backend, config.layout != "auto"
    if not (is_set or config.max_questions or config.eagle3_path or block_size > 1):
        return CAUSAL, ALL_CAUSAL
    attention = attention_of(target)
    if attention is not Attention.FULL:
        _check_asked(config, family_of(target), block_size)
    check_backends(backend, _backends_of(args, "prefill", "decode"))
    if block_size > 1:
        block_layout(args, config)
    return choose_layout(config.layout, backend, args.page_size or 1, attention=attention)


def _check_asked(config: ParseConfig, family: Family, block_size: int) -> None:
    """Raises BackendError for passes that were not seen with a target of this family."""
    what, fix = "drafts in blocks or an EAGLE-3 head", "leave them out"
    if not family.is_asked:
        what = f"questions, {what}, or {flag('layout')}"
        fix = f"use {flag('judge')} likelihood or {flag('verification')} token, and none of these"
    elif block_size == 1 and not config.eagle3_path:
        return
    raise BackendError(f"{what} with a target of {family.attention}", fix)


def block_layout(args: Any, config: ParseConfig) -> str:
    """Returns the layout of a draft's blocks that no CUDA graph runs.

    Raises:
        BackendError: the draft model's attention backend cannot run them.
    """
    backend = draft_attention(args)
    is_own = backend != args.attention_backend
    setting, where = ("auto", OF_DRAFT) if is_own else (config.layout, OF_TARGET)
    check_backends(backend, {}, where)
    return choose_layout(setting, backend, args.page_size or 1, where)[0]


def _backends_of(args: Any, *phases: str) -> dict[str, str | None]:
    names = [f"{phase}_attention_backend" for phase in phases]
    return {flag_of(name): getattr(args, name) for name in names}


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
