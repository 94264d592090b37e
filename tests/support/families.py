"""Tiny models with random weights of the real classes of families with other attention."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

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
TIED = {"tie_word_embeddings": True, "initializer_range": 0.02}
"""As SGLang loads Gemma. Larger embeddings would make it repeat its input: its layers' outputs are
normalized, so that they do not depend on this."""
UNFUSED = ("--disable-shared-experts-fusion",)


@dataclass(frozen=True)
class Tiny:
    """A family's classes in transformers (``nameConfig`` and ``nameForCausalLM``), its sizes, and
    flags that its servers need. ``config``: the name of its configuration if it is another."""

    name: str
    sizes: dict[str, Any]
    flags: tuple[str, ...] = ()
    config: str = ""

    def pair(self, folder: Path) -> tuple[Path, Path]:
        """A target and a noisy copy as its draft."""
        names = (f"{self.config or self.name}Config", f"{self.name}ForCausalLM")
        kind = tuple(getattr(transformers, name) for name in names)
        return make_pair(folder, PairShape(seed=5, noise=0.01), kind=kind, **self.sizes)


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
    "glm-4.7-flash": Tiny("Glm4MoeLite", LATENT, UNFUSED),
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
    """Some of its layers have recurrent states, so that it can be no draft. ``published``: what the
    config.json of published models has beside what transformers writes."""

    published: dict[str, Any] = field(default_factory=dict)

    def pair(self, folder: Path) -> tuple[Path, Path]:
        """A target, and a model with full attention and the target's embeddings as its draft.

        Their layers add so little to the embeddings that they choose the same token half of the
        time, and so much that half of the tokens depend on them.
        """
        target, _ = super().pair(folder / "hybrid")
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
        path = target / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | self.published))
        return target, draft


MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
MAMBA |= {"mamba_expand": 2, "mamba_d_conv": 4, "mamba_chunk_size": 16}
TINY |= {
    "falcon-h1": TinyHybrid("FalconH1", MAMBA | {"mamba_d_ssm": 128}),
    "granite-4": TinyHybrid(
        "GraniteMoeHybrid",
        MAMBA
        | {"layer_types": ["mamba", "mamba", "attention"], "num_hidden_layers": 3}
        | {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96}
        | {"position_embedding_type": "rope"},
    ),
    "lfm2": TinyHybrid(
        "Lfm2",
        {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
        | {"conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
    ),
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
