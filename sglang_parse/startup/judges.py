"""Start-up checks of a verdict head, and of the layers that verify passes capture."""

from __future__ import annotations

import logging
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from sglang_parse.core.config import ParseConfig, flag, parse_layers
from sglang_parse.core.judge import WEIGHTS, JudgeFile
from sglang_parse.startup.certificates import pair_digests
from sglang_parse.startup.families import ANY, HEADED, family_of
from sglang_parse.startup.models import refuse, require

logger = logging.getLogger(__name__)
SETTING = flag("judge")


def check_judge(args: Any, config: ParseConfig, target: Any) -> None:
    """Checks that the target has the layers to capture, and that the head was trained for it.

    Args:
        args: SGLang's view of ``ServerArgs``.
        target: the target's ``ModelConfig``.

    Raises:
        AdmissionError: with setting, value and fix.
    """
    _check_layers(flag("hidden_layers"), parse_layers(config.hidden_layers), target)
    head = config.judge_file
    if head is not None:
        _check_layers(SETTING, head.layers, target)
        _check_weights(config.judge, head)
        _check_models(args, config.judge, head)
    if config.eagle3_path or config.captured_layers:
        _check_capture(target)


def _check_layers(setting: str, layers: Any, target: Any) -> None:
    last = target.num_hidden_layers - 2
    fix = f"use layers 0..{last}: SGLang captures the outputs of all layers but the last"
    require(all(layer <= last for layer in layers), f"layers of {setting}", layers, fix)


def _check_weights(path: str, head: JudgeFile) -> None:
    width = len(head.layers) * head.hidden_size
    wanted = {"weights": [head.num_weights, width], "scalars": [2], "bias": [1]}
    found: dict[str, list]
    try:
        tensors = load_file(f"{path}/{WEIGHTS}")
        found = {name: list(tensor.shape) for name, tensor in tensors.items()}
    except (OSError, SafetensorError) as error:
        tensors, found = {}, {"cannot be read": [str(error)]}
    where, fix = f"{WEIGHTS} of {SETTING} {path}", "run sglang-parse train-judge"
    require(found == wanted, where, found, f"{fix}; its judge.json says {wanted}")
    for name, tensor in tensors.items():
        bad = tensor[~tensor.float().isfinite()]
        require(not len(bad), f"{name} in {where}", bad[:1].tolist(), f"{fix} again")


def _check_models(args: Any, path: str, head: JudgeFile) -> None:
    """Refuses another target's head; warns about another draft model's."""
    target, draft = pair_digests(args)
    trained, fix = head.fingerprint, "run sglang-parse train-judge for this pair"
    if trained.target != target:
        refuse(SETTING, path, fix, why=f"trained for target {trained.target}, this is {target}")
    if trained.draft != draft:
        logger.warning(
            "PARSE: %s %s was trained on drafts of another draft model (%s, this is %s): its "
            "verdicts may be worse here. Fix: %s.",
            SETTING,
            path,
            trained.draft,
            draft,
            fix,
        )


def _check_capture(target: Any) -> None:
    """Raises AdmissionError for a target whose layers SGLang cannot capture."""
    from sglang.srt.models.registry import ModelRegistry

    names, family = target.hf_config.architectures, family_of(target)
    model, _ = ModelRegistry.resolve_model_cls(names)
    fix = f"use {SETTING} question or likelihood, which read no hidden states"
    methods = (f"set_{name}_layers_to_capture" for name in ("eagle3", "dflash"))
    has_method = any(hasattr(model, name) for name in methods)
    why = f"with {family.attention}, and no head was seen to read its layers"
    where = "architecture of the target with a head or captured layers"
    require(family.judges in (ANY, HEADED), where, names[0], fix, why=why)
    require(has_method, "architecture of the target with captured layers", names[0], fix)
