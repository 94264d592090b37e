"""What else lies in the folder of a published model: other names of weights, other files."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from support import kimi_processor
from support.models import load_tokenizer

WEIGHTS = "model.safetensors"
CONFIGURATION = "configuration"
AUTO_MAP = {"auto_map": {"AutoConfig": f"{CONFIGURATION}.Published"}}
CLASS = """
from transformers import PretrainedConfig


class Published(PretrainedConfig):
    model_type = "{}"

    def __init__(self, rope_theta=None, rope_scaling=None, **kwargs):
        super().__init__(**kwargs)
        self.rope_theta = rope_theta
"""
"""In place of the hub's class transformers has one of its own, with other names: for Step, SGLang
cannot read it."""


def add_configuration(folder: Path, model_type: str) -> None:
    """Adds the code of the configuration that comes with a model."""
    (folder / f"{CONFIGURATION}.py").write_text(CLASS.format(model_type))


def keep_text_of_step(folder: Path, config: dict[str, Any]) -> None:
    """Makes Step 3.5, with this ``config``, of a Step 3.7."""
    file = folder / "config.json"
    text = json.loads(file.read_text())["text_config"]
    tokens = {key: text[key] for key in ("vocab_size", "eos_token_id", "pad_token_id")}
    file.write_text(json.dumps(config | tokens | AUTO_MAP | {"model_type": "step3p5"}))
    add_configuration(folder, "step3p5")
    weights = load_file(folder / WEIGHTS)
    kept = {k: w for k, w in weights.items() if k.startswith(("model.layers.", "model.embed_"))}
    kept |= {name: weights[name] for name in ("model.norm.weight", "lm_head.weight")}
    save_file(kept, folder / WEIGHTS, {"format": "pt"})


def rename_vision(folder: Path) -> None:
    """Of Gemma, whose names SGLang reads as published models have them."""
    _rename(folder, {"vision_tower.": "vision_tower.vision_model."})


def _rename(folder: Path, parts: dict[str, str]) -> None:
    weights = load_file(folder / WEIGHTS)
    for old, new in parts.items():
        weights = {name.replace(old, new): weight for name, weight in weights.items()}
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


def save_qwen_processor(folder: Path) -> None:
    """SGLang asks for the one of images even to serve texts."""
    images = transformers.Qwen2VLImageProcessor(patch_size=16)
    videos = transformers.Qwen3VLVideoProcessor()
    tokenizer = load_tokenizer(folder)
    transformers.Qwen3VLProcessor(images, tokenizer, videos).save_pretrained(folder)


def publish_kimi(folder: Path) -> None:
    """The same; of this one SGLang reads more than transformers' class has.

    transformers reads the published names, and writes some others.
    """
    _rename(folder, {"model.blocks.": "model.layers.", "model.mm_projector.": "mm_projector."})
    _rename(folder, {"encoder.patch_embed.": "patch_embed."})
    _change(folder / "config.json", architectures=["KimiK25ForConditionalGeneration"])
    images, videos = transformers.Kimi_K25ImageProcessor(), transformers.Kimi_K25VideoProcessor()
    parts = images, load_tokenizer(folder), videos
    transformers.Kimi_K25Processor(*parts).save_pretrained(folder)
    code = Path(kimi_processor.__file__)
    shutil.copy(code, folder)
    name = {"AutoProcessor": f"{code.stem}.KimiProcessor"}
    _change(folder / "processor_config.json", auto_map=name)


def _change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def save_as_mistral(folder: Path) -> None:
    """Mistral's own files, beside those of transformers. Weights for images are left out."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "params.json").write_text(json.dumps(_params(config)))
    weights = dict(_of_mistral(load_file(folder / WEIGHTS)))
    save_file(weights, folder / "consolidated.safetensors", {"format": "pt"})


OF_MISTRAL = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
}
SAME = ("q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "kv_lora_rank", "v_head_dim")
SAME += ("head_dim", "vocab_size", "max_position_embeddings")
OF_MOE = {
    "first_k_dense_replace": "first_k_dense_replace",
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
    "routed_scale": "routed_scaling_factor",
    "expert_hidden_dim": "moe_intermediate_size",
    "num_shared_experts": "n_shared_experts",
}
VISION = {"hidden_size": 32, "num_channels": 3, "image_size": 28, "patch_size": 14}
VISION |= {"intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"rope_theta": 10000.0, "image_token_id": 302, "adapter_bias": False}
VISION |= {"mm_projector_id": "patch_merge", "spatial_merge_size": 2}
VISION |= {"add_pre_mm_projector_layer_norm": True}


def _params(config: dict[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    trained = {"original_max_position_embeddings": rope["original_max_position_embeddings"]}
    yarn = {"factor": rope["factor"], "beta": rope["beta_fast"], "alpha": rope["beta_slow"]}
    return {
        **{own: config[name] for own, name in OF_MISTRAL.items()},
        **{name: config[name] for name in SAME},
        "rope_theta": rope["rope_theta"],
        "yarn": trained | yarn | {"apply_scale": False},
        "llama_4_scaling": trained | {"beta": rope["llama_4_scaling_beta"]},
        "moe": {own: config[name] for own, name in OF_MOE.items()} | {"route_every_n": 1},
        "vision_encoder": VISION,
    }


NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_a_proj": "attention.wq_a",
    "self_attn.q_a_layernorm": "attention.q_a_norm",
    "self_attn.q_b_proj": "attention.wq_b",
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a_with_mqa",
    "self_attn.kv_a_layernorm": "attention.kv_a_norm",
    "self_attn.kv_b_proj": "attention.wkv_b",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate.": "gate.",
    "mlp.shared_experts": "shared_experts",
    "mlp.experts": "experts",
    "mlp": "feed_forward",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}


def _of_mistral(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    parts = re.compile("|".join(map(re.escape, NAMES)))
    for name, weight in _by_expert(weights):
        yield parts.sub(lambda part: NAMES[part[0]], name), weight.contiguous()


def _by_expert(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """transformers has one tensor for all experts of a layer."""
    for name, weight in weights.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            yield name, weight
            continue
        layer, _, kind = name.rpartition(".")
        for expert, part in enumerate(weight):
            if kind == "down_proj":
                yield f"{layer}.{expert}.down_proj.weight", part
            else:
                for own, half in zip(("gate_proj", "up_proj"), part.chunk(2), strict=True):
                    yield f"{layer}.{expert}.{own}.weight", half
