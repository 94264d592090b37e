"""Tiny models with random weights of the real classes of families with other attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import transformers

from support.random_pair import PairShape, make_pair

MOE = {"moe_intermediate_size": 48, "n_routed_experts": 4, "n_shared_experts": 1}
MOE |= {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
MOE |= {"routed_scaling_factor": 1.0, "moe_layer_freq": 1}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
LATENT |= {"v_head_dim": 16, "num_key_value_heads": 4, "num_hidden_layers": 3, **MOE}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0}
YARN |= {"mscale_all_dim": 1.0, "original_max_position_embeddings": 1024}
YARN |= {"beta_fast": 32, "beta_slow": 1}
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

    ``config``: the name of its configuration if it is another; ``whole``: the class of the model
    that the text model is a part of.
    """

    name: str
    sizes: dict[str, Any]
    flags: tuple[str, ...] = ()
    config: str = ""
    whole: str = ""

    @property
    def architecture(self) -> str:
        return self.whole or f"{self.name}ForCausalLM"

    def pair(self, folder: Path, noise: float = 0.01) -> tuple[Path, Path]:
        """A target and a noisy copy as its draft."""
        config = getattr(transformers, f"{self.config or self.name}Config")
        if self.whole:
            config = partial(_whole_config, config)
        kind = (config, getattr(transformers, self.architecture))
        return make_pair(folder, PairShape(seed=5, noise=noise), kind=kind, **self.sizes)


VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
VISION |= {"num_attention_heads": 2, "num_key_value_heads": 2, "position_embedding_size": 16}


def _whole_config(config: Any, **sizes: Any) -> Any:
    """Of a model with images, which is served without them."""
    tied = {"tie_word_embeddings": sizes["tie_word_embeddings"]}
    return config(text_config=sizes, vision_config=VISION, language_model_only=True, **tied)


TINY = {
    "deepseek-v2": Tiny(
        "DeepseekV2",
        LATENT
        | {"q_lora_rank": None, "rope_parameters": YARN, "scoring_func": "softmax"}
        | {"topk_method": "greedy", "norm_topk_prob": False},
        UNFUSED,
    ),
    "gemma-3": Tiny(
        "Gemma3",
        {
            "num_hidden_layers": 4,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 16,
            **TIED,
        },
        config="Gemma3Text",
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
        whole="Gemma4ForConditionalGeneration",
    ),
    "glm-4.7-flash": Tiny("Glm4MoeLite", LATENT, UNFUSED),
    "gpt-oss": Tiny(
        "GptOss",
        WINDOWS | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
        ("--moe-runner-backend", "triton"),
    ),
}
