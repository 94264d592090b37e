"""Checks of a server's models before one is loaded: folders, shapes, tokenizers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NoReturn

from sglang_parse.core.block import USUAL_BLOCK
from sglang_parse.core.config import ParseConfig, flag

TARGET, DRAFT = "--model-path", "--speculative-draft-model-path"


class AdmissionError(ValueError):
    """An unsupported server configuration: setting, value found, fix."""


def refuse(setting: str, value: object, fix: str) -> NoReturn:
    raise AdmissionError(f"PARSE: {setting} is {value!r}. Fix: {fix}")


def require(is_met: object, setting: str, value: object, fix: str) -> None:
    if not is_met:
        refuse(setting, value, fix)


def flag_of(field: str) -> str:
    """Returns the flag of a field of ``ServerArgs``; ``config.flag`` is for PARSE's."""
    return f"--{field.replace('_', '-')}"


def _check_folder(path: str, setting: str) -> None:
    """A name that is no local path is left to SGLang, which may download it."""
    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, "config.json")):
        refuse(setting, path, "it cannot be read as a model (no config.json); give one that can")
    elif os.path.isabs(path) and not os.path.isdir(path):
        refuse(setting, path, "it does not exist; give the folder of a model")


def check_models(args: Any, tokenizer: Any) -> tuple[Any, Any]:
    """Returns the ``ModelConfig`` of target and draft, None without a draft model.

    Raises:
        AdmissionError: they do not fit.
    """
    target, draft = read_pair(args)
    checks = PAIR_CHECKS if draft else (check_attention,)
    for check in checks:
        check(args, target, draft)
    if draft:
        check_tokenizers(args, tokenizer)
    return target, draft


def read_pair(args: Any) -> tuple[Any, Any]:
    """Returns the ``ModelConfig`` of target and draft, unchecked; None without a draft model."""
    draft_path = args.speculative_draft_model_path
    fix = "give a small model with the target's tokenizer, or leave the flag out"
    require(draft_path != "", DRAFT, draft_path, fix)
    if draft_path:
        _check_folder(draft_path, DRAFT)
    target = _model_config(args, args.model_path, args.context_length, TARGET)
    return target, _model_config(args, draft_path, None, DRAFT) if draft_path else None


def check_vocabularies(args: Any, target: Any, draft: Any) -> None:
    found, wanted = draft.vocab_size, target.vocab_size
    value = f"{args.speculative_draft_model_path} with {found} tokens, the target has {wanted}"
    require(found == wanted, DRAFT, value, "use a draft model with the target's vocabulary")


def check_heads(args: Any, _target: Any, model: Any, name: str = "draft model") -> None:
    """``model``: any with KV on every rank; ``name`` is for the error."""
    num = model.num_attention_heads
    fix = f"use one that divides the {name}'s {num} attention heads"
    require(num % args.tp_size == 0, "--tp-size", args.tp_size, fix)


def check_contexts(args: Any, target: Any, draft: Any) -> None:
    found, wanted = draft.context_len, target.context_len
    path = args.speculative_draft_model_path
    value = f"{path} with context length {found}, the target has {wanted}"
    fix = f"use a longer draft model, or --context-length {found}"
    require(found >= wanted, DRAFT, value, fix)


def check_attention(args: Any, target: Any, draft: Any) -> None:
    """Raises AdmissionError for attention that verify passes or drafts do not support."""
    fix = (
        "use a model with multi-head or grouped-query attention in every layer, such as Qwen3, "
        "Llama 3 or GLM-4.5, or start without --speculative-algorithm PARSE"
    )
    models = [(TARGET, args.model_path, target)]
    if draft is not None:
        models.append((DRAFT, args.speculative_draft_model_path, draft))
    for setting, path, model in models:
        kind = _special_attention(model)
        require(not kind, setting, f"{path}, a {model.hf_config.architectures[0]} with {kind}", fix)
    window = getattr(target.hf_text_config, "sliding_window", None)
    uses_window = getattr(target.hf_text_config, "use_sliding_window", window is not None)
    has_windows = target.is_hybrid_swa or (window and uses_window)
    fix = "use a target with full attention; custom masks are wrong upstream with windows"
    require(not has_windows, "sliding_window of the target model", window, fix)


def _special_attention(model: Any) -> str:
    """Describes what SGLang runs with other KV than one entry per token; "" for none."""
    from sglang.srt.configs import model_config as sglang
    from sglang.srt.configs.hybrid_arch import mambaish_config

    config, latent = model.hf_config, sglang.AttentionArch.MLA
    is_sparse = (sglang.is_deepseek_dsa, sglang.is_deepseek_v4, sglang.is_minimax_sparse)
    text = model.hf_text_config
    named = (getattr(text, name, None) for name in ("layer_types", "layers_block_type"))
    layers = {layer for layers in named for layer in layers or ()}
    is_ssm = mambaish_config(model) or model.attention_arch is sglang.AttentionArch.SSM
    if is_ssm or layers & {"linear_attention", "mamba"}:  # transformers' names
        return "linear attention or Mamba layers, whose state cannot return to an earlier token"
    if any(is_kind(config) for is_kind in is_sparse):
        return "sparse attention, which selects other tokens for a question than for the answer"
    if getattr(config, "has_minicpm_sparse_attention", False):
        return "sparse attention"
    return "latent attention (MLA)" if model.attention_arch is latent else ""


PAIR_CHECKS = (check_attention, check_vocabularies, check_heads, check_contexts)
"""(server's settings, target, draft) -> None; each raises AdmissionError."""


def kv_bytes_per_token(
    model: Any, kv_dtype: str, tp_size: int, draft_kv_dtype: str | None = None
) -> int:
    """Returns the bytes of one token's KV on one rank, by SGLang's formula for draft models.

    Args:
        model: a ``ModelConfig`` with ordinary attention.
        kv_dtype: ``--kv-cache-dtype``. "auto" is the model's dtype, also for a checkpoint with
            FP8 KV: the result is then twice as much.
        tp_size: ranks that the KV heads are split over.
        draft_kv_dtype: ``--speculative-draft-kv-cache-dtype``, for a draft; None if unset.
    """
    from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
    from sglang.srt.speculative.dflash_utils import dflash_draft_cell_size_per_token

    _, dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=kv_dtype,
        model=None,
        model_dtype=model.dtype,
        is_draft_worker=True,
        is_dflash=False,
        speculative_draft_attention_backend=None,
        speculative_draft_kv_cache_dtype=draft_kv_dtype,
    )
    return dflash_draft_cell_size_per_token(
        draft_model_config=model,
        draft_num_layers=model.num_hidden_layers,
        draft_kv_cache_dtype=dtype,
        tp_size=tp_size,
    )


MASK_TOKEN_KEYS = ("pard_token", "ptd_token_id")
"""Keys of the mask token in a draft's config.json: PARD's, and vLLM's other name."""


@dataclass(frozen=True, slots=True)
class ParallelDraft:
    """The parallel drafting of a server's draft model.

    Attributes:
        size: maximum tokens per forward.
        mask_id: the mask token; 0 if ``size`` is 1.
        allow_one_token: whether one token per forward is used when it is faster.
    """

    size: int = 1
    mask_id: int = 0
    allow_one_token: bool = False


def parallel_draft(config: ParseConfig, draft: Any) -> ParallelDraft:
    """Returns the parallel drafting that the settings and the draft's ``ModelConfig`` allow.

    Args:
        draft: None without a draft model.

    Raises:
        AdmissionError: it is set, and the draft's files name no valid mask token.
    """
    size, setting = config.block_size, flag("draft_parallel_tokens")
    if draft is None:
        fix = f"leave it out, or give a draft model with {DRAFT}"
        require(size in (None, 1), setting, size, fix)
        return ParallelDraft()
    named = {key: getattr(draft.hf_config, key, None) for key in MASK_TOKEN_KEYS}
    key, mask_id = next(((k, v) for k, v in named.items() if v is not None), ("", None))
    if size == 1 or (size is None and mask_id is None):
        return ParallelDraft()
    if mask_id is None:
        keys = " or ".join(MASK_TOKEN_KEYS)
        fix = f"use 1, or a draft trained to fill mask tokens: its config.json has {keys}"
        refuse(setting, config.draft_parallel_tokens, fix)
    fix = f"give the id of one of its {draft.vocab_size} tokens, or use {setting} 1"
    is_token = type(mask_id) is int and mask_id in range(draft.vocab_size)
    require(is_token, f"{key} in the draft's config.json", mask_id, fix)
    return ParallelDraft(size or USUAL_BLOCK, mask_id, allow_one_token=size is None)


def slot_sharers(args: Any) -> list[Any]:
    """Returns the ``ModelConfig`` of every model with KV under the target's slot numbers."""
    config = ParseConfig.from_env()
    draft_path = args.speculative_draft_model_path
    sharers = [_model_config(args, draft_path, None, DRAFT)] if draft_path else []
    if config.uses_eagle3:
        sharers.append(_model_config(args, config.eagle3_path, None, flag("eagle3_path")))
    return sharers


def check_head(args: Any, config: ParseConfig, target: Any) -> int:
    """Checks the EAGLE-3 head; returns the number of tokens that it proposes."""
    steps = 3 if args.speculative_num_steps is None else args.speculative_num_steps
    tokens, topk = args.speculative_num_draft_tokens, args.speculative_eagle_topk
    require(steps >= 1, "--speculative-num-steps", steps, "use 1 or more")
    fix = "use 1: PARSE's EAGLE-3 proposes a chain"
    require(topk in (None, 1), "--speculative-eagle-topk", topk, fix)
    fix = f"leave it out, or use {steps + 1}: one more than --speculative-num-steps"
    require(tokens in (None, steps + 1), "--speculative-num-draft-tokens", tokens, fix)
    has_tiers, setting = args.enable_hierarchical_cache, flag_of("enable_hierarchical_cache")
    fix = f"leave it out with {flag('decode_accelerator')} eagle3"
    require(not has_tiers, setting, has_tiers, fix)
    path, setting = config.eagle3_path, flag("eagle3_path")
    _check_folder(path, setting)
    head = _model_config(args, path, None, setting)
    _check_head_fits(head, target, f"{setting} {path}")
    check_heads(args, target, head, "head")
    return steps


def _check_head_fits(head: Any, target: Any, name: str) -> None:
    """Raises AdmissionError if a head does not fit the target's hidden states."""
    config, made = head.hf_config, "use a head made for this target,"
    kinds = config.architectures or ()
    is_head = any("eagle3" in kind.lower() for kind in kinds)
    require(is_head, f"architectures of {name}", kinds, "give an EAGLE-3 head")
    width = getattr(config, "target_hidden_size", None) or head.hidden_size
    for what, value, wanted in (
        ("hidden size", width, target.hidden_size),
        ("vocabulary", head.vocab_size, target.vocab_size),
    ):
        require(value == wanted, f"{what} of {name}", value, f"{made} whose {what} is {wanted}")
    key, num_layers = "eagle_aux_hidden_state_layer_ids", target.num_hidden_layers
    layer_ids = (getattr(config, "eagle_config", None) or {}).get(key) or ()
    fit = all(0 <= layer < num_layers for layer in layer_ids)
    require(fit, f"{key} of {name}", layer_ids, f"{made} which has {num_layers} layers")


def _model_config(args: Any, path: str, context_length: int | None, setting: str) -> Any:
    from sglang.srt.configs.model_config import ModelConfig

    try:
        return ModelConfig(
            model_path=path,
            trust_remote_code=args.trust_remote_code,
            context_length=context_length,
            model_override_args=args.json_model_override_args,
            dtype=args.dtype,
            sampling_defaults=args.sampling_defaults,
        )
    except (OSError, ValueError, KeyError) as error:
        raise AdmissionError(
            f"PARSE: {setting} is {path!r}, which cannot be read as a model ({error}). "
            "Fix: give a folder with config.json, weights and tokenizer"
        ) from error


def tokenizer_of(args: Any, path: str = "") -> Any:
    """Returns a model's tokenizer; without a path, the target's."""
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    path, trust = path or args.tokenizer_path or args.model_path, args.trust_remote_code
    return get_tokenizer(path, tokenizer_mode=args.tokenizer_mode, trust_remote_code=trust)


def check_tokenizers(args: Any, target: Any) -> None:
    """Raises AdmissionError if the draft's tokenizer differs from ``target``, the target's."""
    draft_path = args.speculative_draft_model_path
    try:
        draft = tokenizer_of(args, draft_path)
    except (OSError, ValueError) as error:
        raise AdmissionError(
            f"PARSE: {DRAFT} is {draft_path!r}, without a readable tokenizer ({error}). Fix: put "
            "the draft's tokenizer files into its folder; they are compared with the target's"
        ) from error
    different = sorted(target.get_vocab().items() ^ draft.get_vocab().items())
    count, some = len(different), different[:2]
    value = f"{draft_path}, whose tokenizer differs from the target's in {count} entries: {some}"
    require(not different, DRAFT, value, "use a draft model with the target's tokenizer")
