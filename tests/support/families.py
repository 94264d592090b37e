"""Tiny models with random weights of the real classes of families with other attention."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from support.models import load_model
from support.random_pair import PairShape, make_pair

MOE = {"moe_intermediate_size": 48, "n_routed_experts": 4, "n_shared_experts": 1}
MOE |= {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
MOE |= {"routed_scaling_factor": 1.0, "moe_layer_freq": 1}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
LATENT |= {"v_head_dim": 16, "num_key_value_heads": 4, "num_hidden_layers": 3, **MOE}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0}
YARN |= {"mscale_all_dim": 1.0, "original_max_position_embeddings": 1024}
YARN |= {"beta_fast": 32, "beta_slow": 1}
OLMO_YARN = {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2079441541679836}
OLMO_YARN |= {"original_max_position_embeddings": 1024, "beta_fast": 32.0, "beta_slow": 1.0}
TIED = {"tie_word_embeddings": True, "initializer_range": 0.02}
"""As SGLang loads Gemma. Larger embeddings would make it repeat its input: its layers' outputs are
normalized, so that they do not depend on this."""
WINDOWS = {"num_hidden_layers": 4, "sliding_window": 16}
WINDOWS |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
UNFUSED = ("--disable-shared-experts-fusion",)


@dataclass(frozen=True)
class Tiny:
    """A family's classes in transformers (``nameConfig`` and ``nameForCausalLM``), its sizes, and
    flags that its servers need.

    Attributes:
        config: the name of its configuration if it is another.
        vision: the configuration of its part for images, where it has one.
        served_as: the class of SGLang that serves it if it is another.
        published: keys of config.json as published models have them, where transformers writes
            others that SGLang does not read; None for one that they do not have.
        window: of transformers, where SGLang's is another.
        noise: of the draft; drafts are kept whole, in part and not at all.
    """

    name: str
    sizes: dict[str, Any]
    flags: tuple[str, ...] = ()
    config: str = ""
    vision: dict[str, Any] = field(default_factory=dict)
    served_as: str = ""
    published: dict[str, Any] = field(default_factory=dict)
    window: int | None = None
    noise: float = 0.01

    @property
    def model(self) -> str:
        """The name of its class in transformers."""
        return f"{self.name}For{'ConditionalGeneration' if self.vision else 'CausalLM'}"

    def _with_vision(self, **text: Any) -> Any:
        config = getattr(transformers, f"{self.name}Config")
        tied = text["tie_word_embeddings"]
        return config(text_config=text, tie_word_embeddings=tied, **self.vision)

    @staticmethod
    def _publish_vision(file: Path) -> None:
        """Names the weights as SGLang reads them, and as published models have them."""
        weights = load_file(file)
        names = {name: name.replace("vision_tower.", f"{VISION}.") for name in weights}
        save_file({names[name]: weights[name] for name in weights}, file, {"format": "pt"})

    def _publish(self, file: Path) -> None:
        """Writes config.json as published models have it."""
        config = json.loads(file.read_text()) | self.published
        dropped = [key for key, value in self.published.items() if value is None]
        file.write_text(json.dumps({k: v for k, v in config.items() if k not in dropped}))

    def pair(self, folder: Path, noise: float | None = None) -> tuple[Path, Path]:
        """A target and a copy of it as its draft, with ``noise``, by default the family's."""
        config = getattr(transformers, f"{self.config or self.name}Config")
        kind = (self._with_vision if self.vision else config, getattr(transformers, self.model))
        shape = PairShape(seed=5, noise=self.noise if noise is None else noise)
        pair = make_pair(folder, shape, kind=kind, **self.sizes)
        for file in (model / "config.json" for model in pair):
            self._publish(file)
            if self.vision:
                self._publish_vision(file.with_name("model.safetensors"))
        return pair

    def load(self, folder: Path) -> Any:
        """A model of it in transformers."""
        model = load_model(folder)
        if self.window is not None:
            model.config.sliding_window = self.window
        return model


TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
TOWER |= {"num_attention_heads": 2, "num_key_value_heads": 2, "position_embedding_size": 16}
GEMMA_3 = WINDOWS | TIED | {"query_pre_attn_scalar": 16}
SIGLIP = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "image_size": 28}
SIGLIP |= {"num_attention_heads": 2, "vision_use_head": False}
VISION = "vision_tower.vision_model"
IMAGES = {"vision_config": SIGLIP, "mm_tokens_per_image": 1, "image_token_index": 302}
TINY = {
    "deepseek-v2": Tiny(
        "DeepseekV2",
        LATENT
        | {"q_lora_rank": None, "rope_parameters": YARN, "scoring_func": "softmax"}
        | {"topk_method": "greedy", "norm_topk_prob": False},
        UNFUSED,
    ),
    "gemma-3": Tiny("Gemma3", GEMMA_3, config="Gemma3Text"),
    "glm-4.7-flash": Tiny("Glm4MoeLite", LATENT, UNFUSED),
    "deepseek-v3": Tiny(
        "DeepseekV3",
        LATENT
        | {"rope_parameters": YARN | {"mscale": 0.7}, "scoring_func": "sigmoid"}
        | {"topk_method": "noaux_tc", "norm_topk_prob": True},
        UNFUSED,
    ),
    "minicpm-3": Tiny(
        "MiniCPM3",
        {name: size for name, size in LATENT.items() if name not in MOE}
        | {"tie_word_embeddings": True, "scale_emb": 1, "dim_model_base": 64},
    ),
    "gemma-2": Tiny(
        "Gemma2",
        WINDOWS
        | TIED
        | {"query_pre_attn_scalar": 16, "hidden_act": "gelu_pytorch_tanh"}
        # So high that it does not matter: SGLang's ``torch_native`` does not cap scores.
        | {"attn_logit_softcapping": 1000.0},
    ),
    "gemma-3-images": Tiny("Gemma3", GEMMA_3, vision=IMAGES, noise=0.04),
    "olmo-3": Tiny(
        "Olmo3",
        WINDOWS,
        served_as="Olmo2ForCausalLM",
        published={"rope_parameters": None, "rope_theta": 500000, "rope_scaling": OLMO_YARN},
    ),
    "command-a": Tiny(
        "Cohere2", WINDOWS | {"tie_word_embeddings": True, "logit_scale": 0.25}, window=17
    ),
    "gemma-4": Tiny(
        "Gemma4",
        {
            **WINDOWS,
            # Layers without a window have other heads.
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            **TIED,
        },
        vision={"vision_config": TOWER, "language_model_only": True},
    ),
    "gpt-oss": Tiny(
        "GptOss",
        WINDOWS | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
        ("--moe-runner-backend", "triton"),
    ),
}


QUIET = ("o_proj", "out_proj", "down_proj", "output_linear", "w2")
"""Weights through which a layer adds to its input."""
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_conv_kernel_dim": 4}
DELTA |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_hidden_layers": 4}
DELTA |= {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
INTERVAL = {"full_attention_interval": 4}
AXES = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
AXES |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}


@dataclass(frozen=True)
class TinyHybrid(Tiny):
    """Some of its layers have recurrent states, so that it can be no draft."""

    # Else states take what memory is free: 9 GB.
    flags: tuple[str, ...] = ("--max-mamba-cache-size", "64")

    def pair(self, folder: Path) -> tuple[Path, Path]:
        """A target, and a model with full attention and the target's embeddings as its draft.

        Their layers add so little to the embeddings that they choose the same token half of the
        time, and so much that half of the tokens depend on them.
        """
        target, _ = super().pair(folder)
        _, draft = make_pair(folder / "full", PairShape(seed=6))
        models = [load_model(path) for path in (target, draft)]
        ends = [(model.get_input_embeddings(), model.get_output_embeddings()) for model in models]
        with torch.no_grad():
            for of_target, of_draft in zip(*ends, strict=True):
                of_draft.weight.copy_(of_target.weight)
            for model, path in zip(models, (target, draft), strict=True):
                for name, parameter in model.named_parameters():
                    parameter.mul_(0.01 if any(part in name for part in QUIET) else 1)
                model.save_pretrained(path)
        self._publish(target / "config.json")
        return target, draft


MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
MAMBA |= {"mamba_expand": 2, "mamba_d_conv": 4, "mamba_chunk_size": 16}
GRANITE = MAMBA | {"layer_types": ["mamba", "mamba", "attention"], "num_hidden_layers": 3}
GRANITE |= {"shared_intermediate_size": 96, "position_embedding_type": "rope"}
KIMI = {"layer_types": DELTA["layer_types"], "mlp_layer_types": ["sparse"] * 4}
KIMI |= {"num_hidden_layers": 4, "linear_head_dim": 16, "linear_num_heads": 4}
KIMI |= {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
KIMI |= {name: LATENT[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")}
KIMI |= {"num_key_value_heads": 4, "qk_rope_head_dim": 16, "routed_scaling_factor": 1.0}
KIMI |= {"bos_token_id": 1}
DELTAS = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "head_dim": 16, "num_heads": 4}
AS_KIMI = {"linear_attn_config": DELTAS | {"short_conv_kernel_size": 4}, "mla_use_nope": True}
AS_KIMI |= {"num_experts": 4, "num_experts_per_token": 2, "num_shared_experts": 1}
NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 8}
# In prefills transformers take no smaller time step than this; SGLang does.
NEMOTRON |= {"chunk_size": 16, "time_step_min": 1e-9, "moe_intermediate_size": 48}
NEMOTRON |= {"moe_shared_expert_intermediate_size": 48, "n_routed_experts": 4}
NEMOTRON |= {"routed_scaling_factor": 2.5}


def nemotron(pattern: str) -> TinyHybrid:
    """Of the two patterns that are published: with plain layers (-) or with experts (E)."""
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    layers = {"layers_block_type": [kinds[letter] for letter in pattern]}
    published = {"layers_block_type": None, "hybrid_override_pattern": pattern}
    flags = (*TinyHybrid.flags, "--moe-runner-backend", "triton")
    return TinyHybrid("NemotronH", NEMOTRON | layers, flags, published=published)


TINY |= {
    "falcon-h1": TinyHybrid("FalconH1", MAMBA | {"mamba_d_ssm": 128}),
    "granite-4": TinyHybrid(
        "GraniteMoeHybrid",
        GRANITE | {"num_local_experts": 0, "num_experts_per_tok": 0},
    ),
    "granite-4-moe": TinyHybrid(
        "GraniteMoeHybrid", GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "kimi-linear": TinyHybrid("KimiLinear", KIMI, published=AS_KIMI),
    "lfm2": TinyHybrid(
        "Lfm2",
        {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
        | {"conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
    ),
    "lfm2-moe": TinyHybrid(
        "Lfm2Moe",
        {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
        | {"conv_L_cache": 3, "num_dense_layers": 1, "moe_intermediate_size": 48}
        | {"num_experts": 4, "num_experts_per_tok": 2},
    ),
    "nemotron-h": nemotron("M-M*-"),
    "nemotron-3": nemotron("MEM*E"),
    "qwen3-next": TinyHybrid(
        "Qwen3Next",
        DELTA
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        | {"shared_expert_intermediate_size": 48, "mlp_only_layers": []},
        published=INTERVAL,
    ),
    "qwen3.5": TinyHybrid(
        "Qwen3_5", DELTA, config="Qwen3_5Text", published=INTERVAL | {"rope_parameters": AXES}
    ),
}

WINDOWED = ("gemma-2", "gemma-3", "gemma-3-images", "olmo-3", "command-a")
"""Those with sliding windows in one KV pool."""
