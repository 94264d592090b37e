"""Checks of what proposes drafts from hidden states: an EAGLE-3 head, or an MTP layer."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from safetensors import SafetensorError, safe_open
from sglang.srt.environ import envs
from sglang.srt.model_executor.cuda_graph_config import Backend

from sglang_parse.attention.support import OF_TARGET, STEPPING, BackendError
from sglang_parse.core.config import ParseConfig, flag
from sglang_parse.core.phases import EAGLE3, MTP
from sglang_parse.startup.certificates import local_folder
from sglang_parse.startup.families import WITH_MTP
from sglang_parse.startup.models import (
    MAIN,
    TARGET,
    check_folder,
    check_heads,
    flag_of,
    head_config,
    mtp_config,
    require,
)

PROPOSED_BY = {EAGLE3: ("eagle3_path", "EAGLE-3 head"), MTP: ("mtp", "MTP layer")}
"""``ParseConfig.proposer`` -> the name of its setting, and what it is called."""
HEAD_KIND = "LlamaForCausalLMEagle3"
"""The EAGLE-3 heads that SGLang has a model of."""
_BEHIND, _BESIDE = "model.layers.{}.", "mtp."
MTP_LAYERS = {
    "MiMoMTP": "model.mtp_layers.0.",
    "Glm4MoeForCausalLMNextN": _BEHIND,
    "DeepseekV3ForCausalLMNextN": _BEHIND,
    "Glm4MoeLiteForCausalLMNextN": _BEHIND,
    "Ernie4_5_MoeForCausalLMMTP": "model.mtp_",
    "Qwen3_5ForCausalLMMTP": _BESIDE,
    "Qwen3NextForCausalLMMTP": _BESIDE,
    "NemotronHForCausalLMMTP": _BESIDE,
}
"""SGLang's classes of MTP layers that were seen to draft -> what the names of their weights begin
with; {}: the layer's number, which is that of the target's layers."""
_STEPS = "of which each step of a draft takes another layer with windows of its own"
_NO_MTP = {
    "MiMoV2MTP": _STEPS,
    "Step3p5MTP": _STEPS,
    "Gemma4ForConditionalGeneration": "whose MTP is another checkpoint, which reads its KV",
    "Gemma4AssistantForCausalLM": "which reads the target's KV",
}
"""Classes of MTP layers, and of targets without one -> why PARSE does not draft with them."""
_INDEX = "model.safetensors.index.json"
GRAPH_STEPS, MAX_STEPS = 3, 7
"""Tokens of the longest proposal by default: of a CUDA graph, which has all of its steps, and in
pieces, where each pass has as many as pay (``EagleSource``)."""


def check_head(args: Any, config: ParseConfig, target: Any) -> int:
    """Checks the EAGLE-3 head or MTP layer; returns the number of tokens that it proposes, 1
    without one."""
    if not config.proposer:
        return _check_no_head(args)
    steps = GRAPH_STEPS if captures_steps(args) else MAX_STEPS
    steps = steps if args.speculative_num_steps is None else args.speculative_num_steps
    tokens, topk = args.speculative_num_draft_tokens, args.speculative_eagle_topk
    require(steps in range(1, 17), "--speculative-num-steps", steps, "use 1 to 16")
    fix = "use 1: PARSE's heads propose a chain"
    require(topk in (None, 1), "--speculative-eagle-topk", topk, fix)
    fix = f"leave it out, or use {steps + 1}: one more than --speculative-num-steps"
    require(tokens in (None, steps + 1), "--speculative-num-draft-tokens", tokens, fix)
    has_tiers, setting = args.enable_hierarchical_cache, flag_of("enable_hierarchical_cache")
    fix = f"leave it out with {flag(PROPOSED_BY[config.proposer][0])}"
    require(not has_tiers, setting, has_tiers, fix)
    if config.mtp:
        _check_mtp(args, config, target)
    else:
        check_head_fits(args, "eagle3_path", config.eagle3_path, target, target.context_len)
    return steps


def captures_steps(args: Any) -> bool:
    """Whether decode steps, and a head's, are CUDA graphs; ``doctor`` has no resolved settings."""
    graphs = args.cuda_graph_config
    return args.device != "cpu" and (graphs is None or graphs.decode.backend != Backend.DISABLED)


def check_head_fits(args: Any, field: str, path: str, model: Any, context_len: int) -> None:
    """Raises AdmissionError if SGLang cannot run a head behind its model.

    Args:
        field: the name of its setting.
        model: the ``ModelConfig`` of the target or of the draft model.
        context_len: the target's, up to which the head runs.
    """
    setting, who = flag(field), "target" if field == "eagle3_path" else "draft model"
    check_folder(path, setting)
    head = head_config(args, setting, path)
    check_heads(args, model, head, "head")
    config, made = head.hf_config, f"use a head made for this {who}, which has"
    kinds, key = config.architectures or (), "eagle_aux_hidden_state_layer_ids"
    layer_ids = (getattr(config, "eagle_config", None) or {}).get(key) or ()
    width = getattr(config, "target_hidden_size", None) or head.hidden_size
    size, words, num_layers = model.hidden_size, model.vocab_size, model.num_hidden_layers
    own = getattr(config, "draft_vocab_size", None) or head.vocab_size
    longer, length = envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN, head.context_len
    name = f"{setting} {path}"
    fix = f"give an EAGLE-3 head; if it is one, write {HEAD_KIND} there, as SGLang names it"
    require(HEAD_KIND in kinds, f"architectures of {name}", kinds, fix)
    require(width == size, f"hidden size of {name}", width, f"{made} {size}")
    require(head.vocab_size == words, f"vocabulary of {name}", head.vocab_size, f"{made} {words}")
    fits = all(0 <= layer < num_layers for layer in layer_ids)
    require(fits, f"{key} of {name}", layer_ids, f"{made} {num_layers} layers")
    fix = f"write false there: SGLang would not read the {own} rows of its own lm_head"
    is_tied = config.tie_word_embeddings and own != head.vocab_size
    require(not is_tied, f"tie_word_embeddings of {name}", True, fix)
    fix = f"use --context-length {length}, or set {longer.name}=1: behind it proposals get worse"
    require(length >= context_len or longer.get(), f"context length of {name}", length, fix)


def _check_no_head(args: Any) -> int:
    """Refuses settings of a head's proposal; returns 1, as ``check_head`` its tokens."""
    fix = f"leave it out, or use {flag('eagle3_path')} or {flag('mtp')}"
    for name in ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"):
        value, why = getattr(args, name), "a setting of an EAGLE-3 head or MTP layer"
        require(value is None, flag_of(name), value, fix, why=why)
    return 1


def _check_mtp(args: Any, config: ParseConfig, target: Any) -> None:
    """Raises AdmissionError or BackendError for an MTP layer that cannot draft for the target."""
    setting, path = flag("mtp"), config.mtp_path
    if path:
        check_folder(path, setting)
    layer, name = mtp_config(args, path), f"{setting} {config.mtp}"
    check_heads(args, target, layer, "MTP layer")
    kind = layer.hf_config.architectures[0]
    fix = f"leave {setting} out; `sglang-parse models` lists the targets whose MTP layer drafts"
    why = _NO_MTP.get(kind, "PARSE was not seen to draft with an MTP layer of it")
    require(kind in MTP_LAYERS, f"architecture of {name}", kind, fix, why=why)
    num, fix = layer.num_nextn_predict_layers, "use a checkpoint with one MTP layer, or none"
    require(num == 1, f"num_nextn_predict_layers of {name}", num, fix)
    sizes = [(one.hidden_size, one.vocab_size) for one in (layer, target)]
    fix = f"use a checkpoint of this target, which has {sizes[1]}"
    require(sizes[0] == sizes[1], f"hidden size and vocabulary of {name}", sizes[0], fix)
    why = f"it has no weights named {_weights_of(layer)}*, and the layer would be random"
    where, fix = path or args.model_path, "use its publisher's checkpoint: a copy may lack them"
    setting = setting if path else TARGET
    require(_has_weights(args, layer, path), f"{setting} with {name}", where, fix, why=why)
    backend = args.decode_attention_backend or args.attention_backend
    backend = args.speculative_draft_attention_backend or backend
    if backend not in STEPPING:
        found, fix = f"{OF_TARGET} is {backend!r} with {name}", f"use one of {', '.join(STEPPING)}"
        raise BackendError(f"{found}: SGLang runs no steps of a draft on it", fix)


def unused_mtp(args: Any, config: ParseConfig, target: Any) -> str:
    """Describes the target's own MTP layer, where it could draft and nothing proposes; else ""."""
    if config.proposer or WITH_MTP.isdisjoint(target.hf_config.architectures):
        return ""
    layer = mtp_config(args)
    kind, num = layer.hf_config.architectures[0], layer.num_nextn_predict_layers
    if kind not in MTP_LAYERS or num != 1 or not _has_weights(args, layer, None):
        return ""
    return f"the checkpoint has an MTP layer ({kind}), which can draft: {flag('mtp')} own"


def _weights_of(layer: Any) -> str:
    """What the names of the layer's weights begin with: as SGLang's loaders look for them."""
    num_layers = layer.hf_text_config.num_hidden_layers
    number = 0 if num_layers == 1 else num_layers
    return MTP_LAYERS[layer.hf_config.architectures[0]].format(number)


def _has_weights(args: Any, layer: Any, path: str | None) -> bool:
    """Whether the checkpoint has the layer's weights, as far as its safetensors files tell."""
    if (args.speculative_draft_load_format or args.load_format) not in ("auto", "safetensors"):
        return True
    revision = MAIN if path else args.revision
    names = _weight_names(path or args.model_path, revision, args.download_dir)
    return not names or any(name.startswith(_weights_of(layer)) for name in names)


def _weight_names(path: str, revision: str | None, cache: str | None) -> set[str]:
    """Returns the names of a checkpoint's weights; none where no safetensors file tells them."""
    folder = local_folder(path, revision, cache)
    try:
        if folder is None:
            index = Path(hf_hub_download(path, _INDEX, revision=revision, cache_dir=cache))
        else:
            index = folder / _INDEX
        return {*json.loads(index.read_text(encoding="utf-8"))["weight_map"]}
    except (OSError, ValueError, KeyError):
        names: set[str] = set()
    for file in folder.glob("*.safetensors") if folder else ():
        # SGLang reports one that cannot be read.
        with suppress(SafetensorError), safe_open(file, framework="pt") as tensors:
            names.update(tensors.keys())
    return names
