"""Who gets in: start-up checks of a server, and which requests PARSE can serve faithfully.

``validate_server_args`` runs in the launcher, where what it raises reaches the user unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jinja2

from sglang_parse import compat
from sglang_parse.attention.support import check_backends, choose_layout
from sglang_parse.config import ParseConfig, RequestOptions, flag
from sglang_parse.question import Question, QuestionWording, render_question
from sglang_parse.simulation import SimulatedAcceptance


class AdmissionError(ValueError):
    """A server configuration PARSE cannot work with: setting, value found, fix."""


def validate_server_args(server_args: Any) -> None:
    """Check everything that can be checked before a model is loaded, then fill in what PARSE sets.

    Args:
        server_args: SGLang's stand-in for ``ServerArgs``; writes become declared overrides.

    Raises:
        AdmissionError, BackendError, ConfigError, QuestionError, CompatError: with setting, value
            and fix.
    """
    compat.check()
    config = ParseConfig.from_env()
    SimulatedAcceptance.from_env(config)
    _check_settings(server_args)
    pass_layout(server_args, config)
    compat.check_backend(server_args.attention_backend)
    tokenizer = _tokenizer(server_args, server_args.tokenizer_path or server_args.model_path)
    target = _check_models(server_args, tokenizer)
    num_steps = _check_head(server_args, config, target) if config.uses_eagle3 else 1
    question = question_for(server_args, tokenizer, config)
    tail = 1 + config.draft_tokens
    if question is not None:
        tail += config.max_prefixes * question.max_len
    # The worker is synchronous. For a registered algorithm overlap stays on unless told so.
    server_args.disable_overlap_schedule = True
    # Widens each request's row of slot numbers (4 bytes a column) to hold the longest pass;
    # slots themselves are allocated by phase.
    server_args.speculative_num_draft_tokens = tail
    server_args.speculative_num_steps = num_steps
    server_args.speculative_eagle_topk = 1
    from sglang_parse.attention.registry import register_backends
    from sglang_parse.observability import with_parse_metrics

    server_args.stat_loggers = with_parse_metrics(server_args.stat_loggers)
    register_backends()


# Where an attention backend would run a pass through kernels PARSE does not plan for.
_NOT_WITH: dict[str, tuple[str, Callable[[Any], bool], str]] = {
    "triton": ("enable_deterministic_inference", bool, "use flashinfer or fa3 with it"),
    "fa3": (
        "kv_cache_dtype",
        lambda dtype: str(dtype).startswith("fp8"),
        "leave it out, or use flashinfer or triton with it",
    ),
}


def _refuse(setting: str, value: object, fix: str) -> None:
    raise AdmissionError(f"PARSE: {setting} is {value!r}. Fix: {fix}")


def _check_settings(args: Any) -> None:
    phases = ("prefill", "decode", "speculative_draft")
    check_backends(
        args.device,
        args.attention_backend,
        {
            f"--{phase.replace('_', '-')}-attention-backend": getattr(
                args, f"{phase}_attention_backend", None
            )
            for phase in phases
        },
    )
    if args.attention_backend in _NOT_WITH:
        name, is_wrong, fix = _NOT_WITH[args.attention_backend]
        value = getattr(args, name, None)
        if is_wrong(value):
            setting = f"--{name.replace('_', '-')} with {args.attention_backend}"
            _refuse(setting, value, fix)
    for name, allowed, fix in (
        ("pp_size", (1,), "PARSE runs without pipeline parallelism"),
        ("enable_dp_attention", (False,), "PARSE runs without DP attention"),
        ("attn_cp_size", (1,), "PARSE runs without context parallelism"),
        ("dcp_size", (1,), "PARSE runs without context parallelism"),
        ("disaggregation_mode", ("null", None), "PARSE runs prefill and decode in one server"),
        ("enable_return_hidden_states", (False,), "PARSE returns no hidden states"),
        ("enable_beam_search", (False,), "PARSE runs without beam search"),
    ):
        value = getattr(args, name, allowed[0])
        if value not in allowed:
            _refuse(f"--{name.replace('_', '-')}", value, fix)


def pass_layout(args: Any, config: ParseConfig) -> tuple[str, str]:
    """The layout of a server's verification passes, and why. Raises: BackendError."""
    return choose_layout(config.layout, args.attention_backend, args.page_size or 1)


def check_draft_path(path: str | None) -> None:
    """Raises: AdmissionError, when no draft model is named or its folder is none.

    A name that is no path on this machine is left to SGLang, which may know where to fetch it.
    """
    setting = "--speculative-draft-model-path"
    if not path:
        _refuse(setting, path, "give the small model that writes the drafts")
    else:
        _check_folder(path, setting)


def _check_folder(path: str, setting: str) -> None:
    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, "config.json")):
        _refuse(setting, path, "it cannot be read as a model (no config.json); give one that can")
    elif os.path.isabs(path) and not os.path.isdir(path):
        _refuse(setting, path, "it does not exist; give the folder of a model")


def _check_models(args: Any, tokenizer: Any) -> Any:
    """The target's ``ModelConfig``."""
    draft_path = args.speculative_draft_model_path
    check_draft_path(draft_path)
    target = _model_config(args, args.model_path, args.context_length, "--model-path")
    draft = _model_config(args, draft_path, None, "--speculative-draft-model-path")
    window = getattr(target.hf_text_config, "sliding_window", None)
    uses_window = getattr(target.hf_text_config, "use_sliding_window", window is not None)
    if target.is_hybrid_swa or (window and uses_window):
        _refuse(
            "sliding_window of the target model",
            window,
            "use a target with full attention; custom masks are wrong upstream with windows",
        )
    if target.vocab_size != draft.vocab_size:
        _refuse(
            "--speculative-draft-model-path",
            f"{draft_path} with {draft.vocab_size} tokens, the target has {target.vocab_size}",
            "use a draft model with the target's vocabulary",
        )
    if draft.num_attention_heads % args.tp_size:
        _refuse(
            "--tp-size",
            args.tp_size,
            f"use one that divides the draft model's {draft.num_attention_heads} attention heads",
        )
    if draft.context_len < target.context_len:
        _refuse(
            "--speculative-draft-model-path",
            f"{draft_path} with context length {draft.context_len}, "
            f"the target has {target.context_len}",
            f"use a longer draft model, or --context-length {draft.context_len}",
        )
    _check_tokenizers(args, tokenizer, draft_path)
    return target


def slot_sharers(args: Any) -> list[Any]:
    """``ModelConfig`` of every model that keeps its own KV under the target's slot numbers."""
    config = ParseConfig.from_env()
    setting = "--speculative-draft-model-path"
    sharers = [_model_config(args, args.speculative_draft_model_path, None, setting)]
    if config.uses_eagle3:
        sharers.append(_model_config(args, config.eagle3_path, None, flag("eagle3_path")))
    return sharers


def _check_head(args: Any, config: ParseConfig, target: Any) -> int:
    """How many tokens the EAGLE-3 head is ahead. Raises: AdmissionError."""
    steps = 3 if args.speculative_num_steps is None else args.speculative_num_steps
    tokens, topk = args.speculative_num_draft_tokens, args.speculative_eagle_topk
    if steps < 1:
        _refuse("--speculative-num-steps", steps, "use 1 or more")
    if topk not in (None, 1):
        _refuse("--speculative-eagle-topk", topk, "use 1: PARSE's EAGLE-3 proposes a chain")
    if tokens not in (None, steps + 1):
        fix = f"leave it out, or use {steps + 1}: one more than --speculative-num-steps"
        _refuse("--speculative-num-draft-tokens", tokens, fix)
    for name in (
        "enable_hierarchical_cache",
        "speculative_use_rejection_sampling",
        "speculative_adaptive",
        "speculative_draft_window_size",
    ):
        if value := getattr(args, name, None):
            setting = f"--{name.replace('_', '-')}"
            _refuse(setting, value, f"leave it out with {flag('continuation')} eagle3")
    path, setting = config.eagle3_path, flag("eagle3_path")
    _check_folder(path, setting)
    head = _model_config(args, path, None, setting)
    _check_head_fits(head, target, f"{setting} {path}")
    if head.num_attention_heads % args.tp_size:
        fix = f"use one that divides the head's {head.num_attention_heads} attention heads"
        _refuse("--tp-size", args.tp_size, fix)
    return steps


def _check_head_fits(head: Any, target: Any, name: str) -> None:
    """Raises: AdmissionError, when a head cannot read what the target would show it."""
    read = head.hf_config
    if not any("eagle3" in arch.lower() for arch in read.architectures or ()):
        _refuse(f"architectures of {name}", read.architectures, "give an EAGLE-3 head")
    width = getattr(read, "target_hidden_size", None) or head.hidden_size
    layer_ids = (getattr(read, "eagle_config", None) or {}).get("eagle_aux_hidden_state_layer_ids")
    for what, value, wanted in (
        ("hidden size", width, target.hidden_size),
        ("vocabulary", head.vocab_size, target.vocab_size),
    ):
        if value != wanted:
            fix = f"use a head made for this target, whose {what} is {wanted}"
            _refuse(f"{what} of {name}", value, fix)
    num_layers = target.num_hidden_layers
    if any(not 0 <= layer < num_layers for layer in layer_ids or ()):
        fix = f"use a head made for this target, which has {num_layers} layers"
        _refuse(f"eagle_aux_hidden_state_layer_ids of {name}", layer_ids, fix)


def _model_config(args: Any, path: str, context_length: int | None, setting: str) -> Any:
    from sglang.srt.configs.model_config import ModelConfig

    try:
        return ModelConfig(
            model_path=path,
            trust_remote_code=args.trust_remote_code,
            context_length=context_length,
            model_override_args=args.json_model_override_args,
            dtype=args.dtype,
        )
    except (OSError, ValueError, KeyError) as error:
        raise AdmissionError(
            f"PARSE: {setting} is {path!r}, which cannot be read as a model ({error}). "
            "Fix: give a folder with config.json, weights and tokenizer"
        ) from error


def _tokenizer(args: Any, path: str) -> Any:
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    return get_tokenizer(
        path, tokenizer_mode=args.tokenizer_mode, trust_remote_code=args.trust_remote_code
    )


def _check_tokenizers(args: Any, target: Any, draft_path: str) -> None:
    try:
        draft = _tokenizer(args, draft_path)
    except (OSError, ValueError) as error:
        raise AdmissionError(
            f"PARSE: --speculative-draft-model-path is {draft_path!r}, without a readable "
            f"tokenizer ({error}). Fix: put the draft's tokenizer files beside its weights; "
            "they are compared with the target's"
        ) from error
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours != theirs:
        different = sorted(ours.items() ^ theirs.items())
        _refuse(
            "--speculative-draft-model-path",
            f"{draft_path}, whose tokenizer differs from the target's in {len(different)} "
            f"entries, such as {different[:2]}",
            "use a draft model with the target's tokenizer",
        )


def question_for(args: Any, tokenizer: Any, config: ParseConfig) -> Question | None:
    """The server's question, through the chat template it serves; None in token mode.

    Raises:
        AdmissionError, QuestionError: it cannot be asked; with setting, value and fix.
    """
    if not config.is_semantic:
        return None
    wording = QuestionWording.read(config.question_path)
    template = None if wording.suffix else _served_template(args.chat_template)
    try:
        question = render_question(tokenizer, wording, template)
    except jinja2.TemplateError as error:
        raise AdmissionError(
            f"PARSE: the chat template refuses the question's conversation of user, assistant and "
            f"user turn ({error}). Fix: set 'suffix' in the file given to {flag('question')} to "
            "the text that closes the answer, asks {question} and opens the reply"
        ) from error
    if question.max_len > 512:
        _refuse(flag("question"), f"{question.max_len} tokens long", "use a shorter wording")
    return question


def _served_template(setting: str | None) -> str | None:
    """The text of ``--chat-template``; None, when unset, stands for the tokenizer's own.

    Read as SGLang does, ``TemplateManager._load_jinja_template``.
    """
    if not setting:
        return None
    if not setting.endswith(".jinja") or not os.path.isfile(setting):
        _refuse(
            "--chat-template",
            setting,
            f"give a .jinja file, or set 'suffix' in the file given to {flag('question')}",
        )
    with open(setting, encoding="utf-8") as file:
        return file.read().strip("\n").replace("\\n", "\n")


# What PARSE cannot serve faithfully: reason -> does the request ask for it?
_PLAIN_REASONS: tuple[tuple[str, Callable[[Any], object]], ...] = (
    ("log probabilities", lambda req: req.return_logprob),
    ("sampling mask", lambda req: req.return_sampling_mask),
    ("hidden states", lambda req: req.return_hidden_states),
    (
        "grammar",
        lambda req: (
            req.grammar is not None
            or req.sampling_params.json_schema is not None
            or req.sampling_params.regex is not None
            or req.sampling_params.ebnf is not None
            or req.sampling_params.structural_tag is not None
        ),
    ),
    (
        "penalties",
        lambda req: (
            req.sampling_params.frequency_penalty
            or req.sampling_params.presence_penalty
            or req.sampling_params.repetition_penalty != 1.0
        ),
    ),
    ("min_new_tokens", lambda req: req.sampling_params.min_new_tokens),
    ("logit_bias", lambda req: req.sampling_params.logit_bias),
    ("custom logit processor", lambda req: req.custom_logit_processor),
    ("multimodal input", lambda req: req.multimodal_inputs),
    ("input embeddings", lambda req: req.input_embeds is not None),
    ("LoRA", lambda req: req.lora_id),
)


def plain_reason(req: Any, options: RequestOptions) -> str:
    """Why a request is served by plain target decoding; "" when PARSE serves it."""
    return "switched off" if not options.enabled else _special_wish(req)


def continuation(req: Any, config: ParseConfig) -> str:
    """What writes when no draft does, for ``RequestState.continuation``."""
    if not config.uses_eagle3:
        return ""
    return "target" if _special_wish(req) else "eagle3"


def _special_wish(req: Any) -> str:
    """What a request asks for that needs the target's tokens one by one; "" for nothing."""
    for reason, asks in _PLAIN_REASONS:
        if asks(req):
            return reason
    return ""
