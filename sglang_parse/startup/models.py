"""Checks of a server's models before one is loaded: folders, shapes, tokenizers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NoReturn

from sglang_parse.core.block import USUAL_BLOCK
from sglang_parse.core.config import ParseConfig, flag


class AdmissionError(ValueError):
    """An unsupported server configuration: setting, value found, fix."""


def refuse(setting: str, value: object, fix: str) -> NoReturn:
    raise AdmissionError(f"PARSE: {setting} is {value!r}. Fix: {fix}")


def flag_of(field: str) -> str:
    """Returns the flag of a field of ``ServerArgs``; ``config.flag`` is for PARSE's."""
    return f"--{field.replace('_', '-')}"


def check_draft_path(path: str | None) -> None:
    """Raises AdmissionError if there is no draft model, or its folder is none.

    A name that is no local path is left to SGLang, which may download it.
    """
    setting = "--speculative-draft-model-path"
    if not path:
        refuse(setting, path, "give a small model with the target's tokenizer")
    _check_folder(path, setting)


def _check_folder(path: str, setting: str) -> None:
    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, "config.json")):
        refuse(setting, path, "it cannot be read as a model (no config.json); give one that can")
    elif os.path.isabs(path) and not os.path.isdir(path):
        refuse(setting, path, "it does not exist; give the folder of a model")


def check_models(args: Any, tokenizer: Any) -> tuple[Any, Any]:
    """Returns the ``ModelConfig`` of target and draft; raises AdmissionError if they do not fit."""
    target, draft = read_pair(args)
    for check in PAIR_CHECKS:
        check(args, target, draft)
    check_tokenizers(args, tokenizer)
    return target, draft


def read_pair(args: Any) -> tuple[Any, Any]:
    """Returns the ``ModelConfig`` of target and draft, unchecked."""
    setting, draft_path = "--speculative-draft-model-path", args.speculative_draft_model_path
    check_draft_path(draft_path)
    target = _model_config(args, args.model_path, args.context_length, "--model-path")
    return target, _model_config(args, draft_path, None, setting)


def check_vocabularies(args: Any, target: Any, draft: Any) -> None:
    if target.vocab_size != draft.vocab_size:
        refuse(
            "--speculative-draft-model-path",
            f"{args.speculative_draft_model_path} with {draft.vocab_size} tokens, "
            f"the target has {target.vocab_size}",
            "use a draft model with the target's vocabulary",
        )


def check_heads(args: Any, _target: Any, draft: Any) -> None:
    if draft.num_attention_heads % args.tp_size:
        refuse(
            "--tp-size",
            args.tp_size,
            f"use one that divides the draft model's {draft.num_attention_heads} attention heads",
        )


def check_contexts(args: Any, target: Any, draft: Any) -> None:
    if draft.context_len < target.context_len:
        refuse(
            "--speculative-draft-model-path",
            f"{args.speculative_draft_model_path} with context length {draft.context_len}, "
            f"the target has {target.context_len}",
            f"use a longer draft model, or --context-length {draft.context_len}",
        )


def check_attention(args: Any, target: Any, draft: Any) -> None:
    """Raises AdmissionError for attention that verify passes or drafts do not support."""
    models = (
        ("--model-path", args.model_path, target),
        ("--speculative-draft-model-path", args.speculative_draft_model_path, draft),
    )
    for setting, path, model in models:
        if kind := _special_attention(model):
            refuse(
                setting,
                f"{path}, a {model.hf_config.architectures[0]} with {kind}",
                "use a model with multi-head or grouped-query attention in every layer, such as "
                "Qwen3, Llama 3 or GLM-4.5, or start without --speculative-algorithm PARSE",
            )
    window = getattr(target.hf_text_config, "sliding_window", None)
    uses_window = getattr(target.hf_text_config, "use_sliding_window", window is not None)
    if target.is_hybrid_swa or (window and uses_window):
        refuse(
            "sliding_window of the target model",
            window,
            "use a target with full attention; custom masks are wrong upstream with windows",
        )


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
    """Returns the parallel drafting that the settings and the draft's files allow.

    Args:
        config: the server's settings.
        draft: the draft's ``ModelConfig``.

    Raises:
        AdmissionError: it is set, and the draft's files name no valid mask token.
    """
    named = {key: getattr(draft.hf_config, key, None) for key in MASK_TOKEN_KEYS}
    key, mask_id = next(((k, v) for k, v in named.items() if v is not None), ("", None))
    size, setting = config.block_size, flag("draft_parallel_tokens")
    if size == 1 or (size is None and mask_id is None):
        return ParallelDraft()
    if mask_id is None:
        refuse(
            setting,
            config.draft_parallel_tokens,
            f"use 1, or a draft that was trained to fill mask tokens: its config.json has "
            f"{' or '.join(MASK_TOKEN_KEYS)}",
        )
    if (
        isinstance(mask_id, bool)
        or not isinstance(mask_id, int)
        or mask_id not in range(draft.vocab_size)
    ):
        fix = f"give the id of one of its {draft.vocab_size} tokens, or use {setting} 1"
        refuse(f"{key} in the draft's config.json", mask_id, fix)
    return ParallelDraft(size or USUAL_BLOCK, mask_id, allow_one_token=size is None)


def slot_sharers(args: Any) -> list[Any]:
    """Returns the ``ModelConfig`` of every model with KV under the target's slot numbers."""
    config = ParseConfig.from_env()
    setting = "--speculative-draft-model-path"
    sharers = [_model_config(args, args.speculative_draft_model_path, None, setting)]
    if config.uses_eagle3:
        sharers.append(_model_config(args, config.eagle3_path, None, flag("eagle3_path")))
    return sharers


def check_head(args: Any, config: ParseConfig, target: Any) -> int:
    """Checks the EAGLE-3 head; returns the number of tokens that it proposes."""
    steps = 3 if args.speculative_num_steps is None else args.speculative_num_steps
    tokens, topk = args.speculative_num_draft_tokens, args.speculative_eagle_topk
    if steps < 1:
        refuse("--speculative-num-steps", steps, "use 1 or more")
    if topk not in (None, 1):
        refuse("--speculative-eagle-topk", topk, "use 1: PARSE's EAGLE-3 proposes a chain")
    if tokens not in (None, steps + 1):
        fix = f"leave it out, or use {steps + 1}: one more than --speculative-num-steps"
        refuse("--speculative-num-draft-tokens", tokens, fix)
    if value := args.enable_hierarchical_cache:
        name = flag_of("enable_hierarchical_cache")
        refuse(name, value, f"leave it out with {flag('continuation')} eagle3")
    path, setting = config.eagle3_path, flag("eagle3_path")
    _check_folder(path, setting)
    head = _model_config(args, path, None, setting)
    _check_head_fits(head, target, f"{setting} {path}")
    if head.num_attention_heads % args.tp_size:
        fix = f"use one that divides the head's {head.num_attention_heads} attention heads"
        refuse("--tp-size", args.tp_size, fix)
    return steps


def _check_head_fits(head: Any, target: Any, name: str) -> None:
    """Raises AdmissionError if a head does not fit the target's hidden states."""
    config = head.hf_config
    if not any("eagle3" in arch.lower() for arch in config.architectures or ()):
        refuse(f"architectures of {name}", config.architectures, "give an EAGLE-3 head")
    width = getattr(config, "target_hidden_size", None) or head.hidden_size
    layer_ids = (getattr(config, "eagle_config", None) or {}).get(
        "eagle_aux_hidden_state_layer_ids"
    )
    for what, value, wanted in (
        ("hidden size", width, target.hidden_size),
        ("vocabulary", head.vocab_size, target.vocab_size),
    ):
        if value != wanted:
            fix = f"use a head made for this target, whose {what} is {wanted}"
            refuse(f"{what} of {name}", value, fix)
    num_layers = target.num_hidden_layers
    if any(not 0 <= layer < num_layers for layer in layer_ids or ()):
        fix = f"use a head made for this target, which has {num_layers} layers"
        refuse(f"eagle_aux_hidden_state_layer_ids of {name}", layer_ids, fix)


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


def tokenizer_of(args: Any, path: str) -> Any:
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    return get_tokenizer(
        path, tokenizer_mode=args.tokenizer_mode, trust_remote_code=args.trust_remote_code
    )


def check_tokenizers(args: Any, target: Any) -> None:
    """Raises AdmissionError if the draft's tokenizer differs from ``target``, the target's."""
    draft_path = args.speculative_draft_model_path
    try:
        draft = tokenizer_of(args, draft_path)
    except (OSError, ValueError) as error:
        raise AdmissionError(
            f"PARSE: --speculative-draft-model-path is {draft_path!r}, without a readable "
            f"tokenizer ({error}). Fix: put the draft's tokenizer files into its folder; "
            "they are compared with the target's"
        ) from error
    different = sorted(target.get_vocab().items() ^ draft.get_vocab().items())
    if different:
        refuse(
            "--speculative-draft-model-path",
            f"{draft_path}, whose tokenizer differs from the target's in {len(different)} "
            f"entries, such as {different[:2]}",
            "use a draft model with the target's tokenizer",
        )
