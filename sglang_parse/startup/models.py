"""Checks of a server's models before one is loaded: folders, shapes, tokenizers."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open
from sglang.srt.arg_groups.model_override_base import model_config_of

from sglang_parse.core.config import ParseConfig, flag
from sglang_parse.startup.families import instead_of, refusal, usual_drafts

TARGET, DRAFT, MAIN = "--model-path", "--speculative-draft-model-path", "main"
"""The last is the revision that SGLang takes where none is given."""


class AdmissionError(ValueError):
    """An unsupported server configuration: setting, value found, fix."""


def refuse(setting: str, value: object, fix: str, *, why: str = "") -> NoReturn:
    """``why``: what is wrong with the value, where the setting does not say it."""
    found = f"{value!r}: {why}" if why else repr(value)
    raise AdmissionError(f"PARSE: {setting} is {found}. Fix: {fix}")


def require(is_met: object, setting: str, value: object, fix: str, *, why: str = "") -> None:
    if not is_met:
        refuse(setting, value, fix, why=why)


def flag_of(field: str) -> str:
    """Returns the flag of a field of ``ServerArgs``; ``config.flag`` is for PARSE's."""
    return f"--{field.replace('_', '-')}"


def check_folder(path: str, setting: str) -> None:
    """A name that a hub may have, or a URL, is left to SGLang, which may download it."""
    fix = "give the folder of a model, or its name on the Hugging Face hub"
    if os.path.isdir(path):
        is_model = os.path.isfile(os.path.join(path, "config.json"))
        require(is_model, setting, path, fix, why="a folder that has no config.json")
        return
    require(not os.path.exists(path), setting, path, fix, why="a file")
    try:
        validate_repo_id(path)
    except HFValidationError:
        require("://" in path, setting, path, fix, why="it does not exist")


def check_models(args: Any, tokenizer: Any) -> tuple[Any, Any]:
    """Returns the ``ModelConfig`` of target and draft, None without a draft model.

    Raises:
        AdmissionError: they do not fit.
    """
    target, draft = read_pair(args)
    checks = PAIR_CHECKS if draft else TARGET_CHECKS
    for check in checks:
        check(args, target, draft)
    if draft:
        check_tokenizers(args, tokenizer)
        check_vocabularies(args, target, draft, tokenizer)
    return target, draft


def read_pair(args: Any) -> tuple[Any, Any]:
    """Returns the ``ModelConfig`` of target and draft, unchecked; None without a draft model."""
    draft_path = args.speculative_draft_model_path
    if draft_path:
        check_folder(draft_path, DRAFT)
    target = _read(TARGET, args.model_path, partial(model_config_of, args))
    fix = "give a small model with the target's tokenizer, or leave the flag out"
    require(draft_path != "", DRAFT, draft_path, f"{fix} ({usual_drafts(target)})")
    return target, _draft_config(args) if draft_path else None


def check_vocabularies(args: Any, target: Any, draft: Any, tokenizer: Any) -> None:
    """Raises AdmissionError if the draft model's embedding lacks tokens of the tokenizer; what it
    has behind them is padding, as what the target has."""
    found, wanted = draft.vocab_size, min(target.vocab_size, num_ids(tokenizer))
    path, why = args.speculative_draft_model_path, f"{found} tokens, its tokenizer has {wanted}"
    fix = f"use a draft model that was made with its tokenizer ({usual_drafts(target)})"
    require(found >= wanted, DRAFT, path, fix, why=why)


def num_ids(tokenizer: Any) -> int:
    """Returns the number of a tokenizer's ids; those from there on are padding of embeddings."""
    return 1 + max(tokenizer.get_vocab().values())


def check_heads(args: Any, _target: Any, model: Any, name: str = "draft model") -> None:
    """``model``: any with KV on every rank; ``name`` is for the error."""
    num = model.num_attention_heads
    fix = f"use one that divides the {name}'s {num} attention heads"
    require(num % args.tp_size == 0, "--tp-size", args.tp_size, fix)


def check_contexts(args: Any, target: Any, draft: Any) -> None:
    found, wanted = draft.context_len, target.context_len
    path, why = args.speculative_draft_model_path, f"context length {found}, the target's {wanted}"
    fix = f"use a longer draft model, or --context-length {found}"
    require(found >= wanted, DRAFT, path, fix, why=why)


def check_attention(args: Any, target: Any, draft: Any) -> None:
    """Raises AdmissionError for a model whose attention PARSE does not serve."""
    if why := refusal(target, args.device, is_draft=False):
        refuse(TARGET, args.model_path, instead_of(target, args.device), why=why)
    if draft is not None and (why := refusal(draft, args.device, is_draft=True)):
        fix = f"use it on another server, by {flag('draft_url')}, or another draft model here"
        path = args.speculative_draft_model_path
        refuse(DRAFT, path, f"{fix} ({usual_drafts(target)})", why=why)


def check_generation(args: Any, target: Any, _draft: Any) -> None:
    """By the checkpoint, as SGLang decides: ``--is-embedding`` is not needed for every one."""
    fix, why = "start it without --speculative-algorithm PARSE", "a model that generates no text"
    require(target.is_generation, TARGET, args.model_path, fix, why=why)


def check_weights(args: Any, _target: Any, _draft: Any) -> None:
    """SGLang finds out after the target is loaded, and does not say that it is the draft."""
    path = args.speculative_draft_model_path
    if Path(path).is_dir() and (args.speculative_draft_load_format or args.load_format) == "auto":
        has_some = any(
            file.suffix in (".safetensors", ".bin", ".pt") for file in Path(path).iterdir()
        )
        require(has_some, DRAFT, path, "copy it again", why="the folder has no weights")
    for file in Path(path).glob("*.safetensors"):
        try:
            with safe_open(file, framework="pt"):
                continue
        except (OSError, SafetensorError) as error:
            refuse(DRAFT, path, "copy it again", why=f"{file.name} cannot be read ({error})")


TARGET_CHECKS = (check_attention, check_generation)
PAIR_CHECKS = (*TARGET_CHECKS, check_heads, check_contexts, check_weights)
"""(server's settings, target, draft) -> None; each raises AdmissionError."""


def slot_sharers(args: Any) -> list[Any]:
    """Returns the ``ModelConfig`` of every model with KV under the target's slot numbers."""
    config = ParseConfig.from_env()
    sharers = [_draft_config(args)] if args.speculative_draft_model_path else []
    heads = filter(None, (config.eagle3_path, config.draft_eagle3_path))
    sharers += [head_config(args, "an EAGLE-3 head", path) for path in heads]
    return [*sharers, mtp_config(args, config.mtp_path)] if config.mtp else sharers


def _draft_config(args: Any) -> Any:
    path = args.speculative_draft_model_path
    return _read(DRAFT, path, partial(_config_of_draft, args, path, _draft_revision(args)))


def head_config(args: Any, setting: str, path: str) -> Any:
    return _read(setting, path, partial(_config_of_draft, args, path, MAIN))


def mtp_config(args: Any, path: str | None = None) -> Any:
    """Returns the ``ModelConfig`` of the MTP layer of a checkpoint, by default the target's, as of
    stock SGLang's EAGLE: with the class and the KV of the layer, where it has one."""
    where, revision = (path, MAIN) if path else (args.model_path, args.revision)
    return _read(flag("mtp"), where, partial(_config_of_draft, args, where, revision, "EAGLE"))


def _draft_revision(args: Any) -> str:
    return args.speculative_draft_model_revision or MAIN


def _config_of_draft(args: Any, path: str, revision: str | None, algorithm: str = "") -> Any:
    """As SGLang's draft worker builds it, but with the model's own context length."""
    from sglang.srt.configs.model_config import ModelConfig

    return ModelConfig(
        model_path=path,
        trust_remote_code=args.trust_remote_code,
        revision=revision,
        model_override_args=args.json_model_override_args,
        dtype=args.dtype,
        quantization=args.speculative_draft_model_quantization,
        sampling_defaults=args.sampling_defaults,
        is_draft_model=True,
        disable_hybrid_swa_memory=args.disable_hybrid_swa_memory,
        model_config_parser=args.model_config_parser,
        speculative_algorithm=algorithm or args.speculative_algorithm,
    )


def _read(setting: str, path: str, build: Callable[[], Any]) -> Any:
    try:
        return build()
    except (OSError, ValueError, KeyError) as error:
        missing = "" if os.path.exists(path) else "there is no such folder, and "
        raise AdmissionError(
            f"PARSE: {setting} is {path!r}: {missing}it cannot be read as a model ({error}). "
            "Fix: give a folder with config.json, weights and tokenizer"
        ) from error


def tokenizer_of(args: Any, path: str = "", revision: str | None = None) -> Any:
    """Returns a model's tokenizer; without a path, the target's, as SGLang reads it."""
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    return get_tokenizer(
        path or args.tokenizer_path or args.model_path,
        tokenizer_mode=args.tokenizer_mode,
        trust_remote_code=args.trust_remote_code,
        revision=revision or args.revision,
        tokenizer_backend=args.tokenizer_backend,
    )


def check_tokenizers(args: Any, target: Any) -> None:
    """Raises AdmissionError if the draft's tokenizer differs from ``target``, the target's."""
    path = args.speculative_draft_model_path
    fix = "put the draft's tokenizer files into its folder; they are compared with the target's"
    try:
        draft = tokenizer_of(args, path, _draft_revision(args))
    except (OSError, ValueError) as error:
        refuse(DRAFT, path, fix, why=f"without a readable tokenizer ({error})")
    # Without files transformers makes one of special tokens only.
    has_files = len(draft.get_vocab()) > len(draft.all_special_ids)
    require(has_files, DRAFT, path, fix, why="without tokenizer files")
    different = sorted(target.get_vocab().items() ^ draft.get_vocab().items())
    why = f"its tokenizer differs from the target's in {len(different)} entries: {different[:2]}"
    require(not different, DRAFT, path, "use a draft model with the target's tokenizer", why=why)
