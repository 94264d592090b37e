"""Tiny models with random weights of the real classes of families with other attention."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from sglang_parse.startup.families import NOT_ON_CPU
from support.demo_pair import DEMO
from support.models import load_model, load_tokenizer
from support.published import (
    AUTO_MAP,
    add_configuration,
    keep_text_of_step,
    publish_kimi,
    rename_vision,
    save_as_mistral,
    save_qwen_processor,
)
from support.random_pair import PairShape, make_pair, resize
from support.servers import plugin

MOE = {"moe_intermediate_size": 48, "n_routed_experts": 4, "n_shared_experts": 1}
MOE |= {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
MOE |= {"routed_scaling_factor": 1.0, "moe_layer_freq": 1}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
LATENT |= {"v_head_dim": 16, "num_key_value_heads": 4, "num_hidden_layers": 3, **MOE}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0}
YARN |= {"mscale_all_dim": 1.0, "original_max_position_embeddings": 1024}
YARN |= {"beta_fast": 32, "beta_slow": 1}
DEEPSEEK_V3 = LATENT | {"rope_parameters": YARN | {"mscale": 0.7}, "scoring_func": "sigmoid"}
DEEPSEEK_V3 |= {"topk_method": "noaux_tc", "norm_topk_prob": True}
LARGE_YARN = YARN | {"original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1}
LARGE_YARN |= {"mscale_all_dim": 0.0, "attention_factor": 1.0}
OLMO_YARN = {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2079441541679836}
OLMO_YARN |= {"original_max_position_embeddings": 1024, "beta_fast": 32.0, "beta_slow": 1.0}
TIED = {"tie_word_embeddings": True, "initializer_range": 0.02}
"""As SGLang loads Gemma. Larger embeddings would make it repeat its input: its layers' outputs are
normalized, so that they do not depend on this."""
WINDOWS = {"num_hidden_layers": 4, "sliding_window": 16}
WINDOWS |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
SPARSE = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
SPARSE |= {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
LLAMA_3 = {"rope_type": "llama3", "rope_theta": 1000000.0, "factor": 16.0, "low_freq_factor": 1.0}
LLAMA_3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
UNFUSED = ("--disable-shared-experts-fusion",)
ON_GPUS = frozenset(NOT_ON_CPU)
"""Before a plugin has taken them out."""


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
        publish: changes what else is in a saved model's folder.
        tokens: what its tokenizer has more than the question pair's, behind those.
        window: of transformers, where SGLang's is another.
        noise: of the draft; drafts are kept whole, in part and not at all.
        padding: tokens of the target behind its tokenizer's, of which the draft has half.
    """

    name: str
    sizes: dict[str, Any]
    flags: tuple[str, ...] = ()
    config: str = ""
    vision: dict[str, Any] = field(default_factory=dict)
    served_as: str = ""
    published: dict[str, Any] = field(default_factory=dict)
    publish: Callable[[Path], None] = lambda folder: None  # noqa: ARG005
    tokens: tuple[str, ...] = ()
    window: int | None = None
    noise: float = 0.01
    padding: int = 0

    @property
    def model(self) -> str:
        """The name of its class in transformers."""
        return f"{self.name}For{'ConditionalGeneration' if self.vision else 'CausalLM'}"

    def _with_vision(self, **text: Any) -> Any:
        config = getattr(transformers, f"{self.name}Config")
        tied = text["tie_word_embeddings"]
        return config(text_config=text, tie_word_embeddings=tied, **self.vision)

    def _publish(self, folder: Path) -> None:
        """Makes a saved model what its publisher would have saved."""
        file = folder / "config.json"
        config = json.loads(file.read_text())
        text = config.get("text_config", config)
        text.update(self.published)
        for key in [key for key, value in self.published.items() if value is None]:
            text.pop(key, None)
        file.write_text(json.dumps(config))
        self.publish(folder)

    def tokenizer(self) -> Any:
        tokenizer = load_tokenizer(DEMO / "target")
        tokenizer.add_tokens([*self.tokens], special_tokens=True)
        return tokenizer

    def pair(self, folder: Path, noise: float | None = None) -> tuple[Path, Path]:
        """A target and a copy of it as its draft, with ``noise``, by default the family's."""
        config = getattr(transformers, f"{self.config or self.name}Config")
        kind = (self._with_vision if self.vision else config, getattr(transformers, self.model))
        shape = PairShape(seed=5, noise=self.noise if noise is None else noise)
        tokenizer, sizes = self.tokenizer(), self.sizes
        if self.padding:
            sizes = sizes | {"vocab_size": len(tokenizer) + self.padding}
        pair = make_pair(folder, shape, tokenizer, kind=kind, **sizes)
        if self.padding:
            resize(pair[1], len(tokenizer) + self.padding // 2)
        for model in pair:
            self._publish(model)
        return pair

    def load(self, folder: Path) -> Any:
        """A model of it in transformers, in fp32, with its part for images where it has one."""
        kind = getattr(transformers, self.model)
        model = kind.from_pretrained(folder, dtype=torch.float32).eval()
        if self.window is not None:
            model.config.sliding_window = self.window
        return model


MIMO = {
    **AUTO_MAP,
    # What transformers derives from the rest, or has no name for.
    "hybrid_layer_pattern": [0, 1, 1, 1],
    "moe_layer_freq": [0, 1, 1, 1],
    **{"sliding_window_size": 16, "attention_chunk_size": 16},
    **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2},
    **{"swa_head_dim": 24, "swa_v_head_dim": 16},
    **{"rope_theta": 5000000.0, "swa_rope_theta": 10000.0, "partial_rotary_factor": 0.334},
    **{"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False},
    **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "layernorm_epsilon": 1e-5},
    **dict.fromkeys(("layer_types", "mlp_layer_types", "rope_parameters")),
}
TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
TOWER |= {"num_attention_heads": 2, "num_key_value_heads": 2, "position_embedding_size": 16}
GEMMA_3 = WINDOWS | TIED | {"query_pre_attn_scalar": 16}
SIGLIP = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "image_size": 28}
SIGLIP |= {"num_attention_heads": 2, "vision_use_head": False}
IMAGES = {"vision_config": SIGLIP, "mm_tokens_per_image": 1, "image_token_index": 302}
MOON_TOWER = {"hidden_size": 32, "vt_hidden_size": 32, "text_hidden_size": 64}
MOON_TOWER |= {"intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
MOON = {"vision_config": MOON_TOWER, "projection_hidden_size": 32, "image_token_id": 302}
MOON |= {"media_placeholder_token_id": 302, "video_token_id": 303}
TINY = {
    "deepseek-v2": Tiny(
        "DeepseekV2",
        LATENT
        | {"q_lora_rank": None, "rope_parameters": YARN, "scoring_func": "softmax"}
        | {"topk_method": "greedy", "norm_topk_prob": False},
        UNFUSED,
    ),
    "gemma-3": Tiny("Gemma3", GEMMA_3, config="Gemma3Text", padding=64),
    "glm-4.7-flash": Tiny("Glm4MoeLite", LATENT, UNFUSED),
    "deepseek-v3": Tiny("DeepseekV3", DEEPSEEK_V3, UNFUSED),
    "kimi-k2.5": Tiny(
        "Kimi_K25",
        DEEPSEEK_V3,
        ("--trust-remote-code", *UNFUSED),
        vision=MOON,
        served_as="KimiK25ForConditionalGeneration",
        publish=publish_kimi,
    ),
    "mistral-large-3": Tiny(
        "Mistral4",
        LATENT | {"rope_parameters": LARGE_YARN, "norm_topk_prob": True, "head_dim": 32},
        UNFUSED,
        served_as="PixtralForConditionalGeneration",
        publish=save_as_mistral,
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
    "gemma-3-images": Tiny("Gemma3", GEMMA_3, vision=IMAGES, publish=rename_vision, noise=0.04),
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
        publish=rename_vision,
    ),
    "gpt-oss": Tiny(
        "GptOss",
        WINDOWS | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
        ("--moe-runner-backend", "triton"),
    ),
    "exaone-4": Tiny(
        "Exaone4",
        # What SGLang's norms of queries and keys have, whatever config.json says.
        WINDOWS
        | {"rms_norm_eps": 1e-6}
        | {"sliding_window_pattern": "LG", "rope_parameters": LLAMA_3},
    ),
    "granite-swash": Tiny(
        "GraniteSWA",
        WINDOWS | {"attention_multiplier": 0.25, "layer_rope_theta": [10000.0, 0, 10000.0, 0]},
    ),
    "laguna": Tiny(
        "Laguna",
        WINDOWS
        | SPARSE
        | {"shared_expert_intermediate_size": 48, "num_attention_heads_per_layer": [8, 4, 8, 4]},
    ),
    "mellum-2": Tiny("Mellum", WINDOWS | SPARSE),
    "mimo-v2-flash": Tiny(
        "MiMoV2Flash",
        {"num_hidden_layers": 4, "sliding_window": 16, "num_key_value_heads": 1}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        | {"head_dim": 24, "v_head_dim": 16},
        ("--trust-remote-code",),
        published=MIMO,
        publish=partial(add_configuration, model_type="mimo_v2_flash"),
        window=17,
    ),
}


QUIET = ("o_proj", "out_proj", "down_proj", "output_linear", "w2")
"""Weights through which a layer adds to its input."""
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_conv_kernel_dim": 4}
DELTA |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_hidden_layers": 4}
DELTA |= {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
INTERVAL = {"full_attention_interval": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
EXPERTS |= {"shared_expert_intermediate_size": 48}
AXES = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
AXES |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
OF_QWEN = INTERVAL | {"rope_parameters": AXES}
QWEN_TOWER = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64}
QWEN_TOWER |= {"out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": []}
QWEN_TOKENS = ("vision_start", "image_pad", "video_pad", "vision_end")
QWEN_IMAGES = {"vision_start_token_id": 384, "image_token_id": 385, "video_token_id": 386}
QWEN_IMAGES |= {"vision_end_token_id": 387, "vision_config": QWEN_TOWER}
IMAGES_OF_QWEN: dict[str, Any] = {"vision": QWEN_IMAGES, "publish": save_qwen_processor}
IMAGES_OF_QWEN |= {"published": OF_QWEN, "tokens": tuple(f"<|{one}|>" for one in QWEN_TOKENS)}


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
        _, draft = make_pair(folder / "full", PairShape(seed=6), self.tokenizer())
        models = [self.load(target), load_model(draft)]
        ends = [(model.get_input_embeddings(), model.get_output_embeddings()) for model in models]
        with torch.no_grad():
            for of_target, of_draft in zip(*ends, strict=True):
                of_draft.weight.copy_(of_target.weight)
            for model, path in zip(models, (target, draft), strict=True):
                for name, parameter in model.named_parameters():
                    parameter.mul_(0.01 if any(part in name for part in QUIET) else 1)
                model.save_pretrained(path)
        self._publish(target)
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
        DELTA | EXPERTS | {"mlp_only_layers": []},
        published=INTERVAL,
    ),
    "qwen3.5": TinyHybrid("Qwen3_5", DELTA, config="Qwen3_5Text", published=OF_QWEN),
    "qwen3.5-images": TinyHybrid("Qwen3_5", DELTA, **IMAGES_OF_QWEN),
    "qwen3.5-moe": TinyHybrid(
        "Qwen3_5Moe", DELTA | EXPERTS, config="Qwen3_5MoeText", published=OF_QWEN
    ),
    "qwen3.5-moe-images": TinyHybrid("Qwen3_5Moe", DELTA | EXPERTS, **IMAGES_OF_QWEN),
}

STEP = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 16},
    **{"num_attention_heads": 4, "num_attention_groups": 2, "sliding_window": 16},
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 2},
    **{"moe_layers_enum": "1,2,3", "moe_num_experts": 4, "moe_top_k": 2},
    **{"moe_intermediate_size": 48, "share_expert_dim": 48, "moe_router_scaling_factor": 3.0},
    **{"need_fp32_gate": True, "use_moe_router_bias": True, "use_head_wise_attn_gate": True},
    # SGLang does not limit experts on a CPU; the shared one it does.
    **{"swiglu_limits": [0.0] * 4, "swiglu_limits_shared": [0.0, 0.0, 0.0, 4.0]},
    **{"rope_theta": [5000000.0, 10000.0] * 2, "partial_rotary_factors": [0.5, 1.0] * 2},
    "yarn_only_types": ["full_attention"],
    "rope_scaling": {key: value for key, value in LLAMA_3.items() if key != "rope_theta"},
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class TinyStep(Tiny):
    """Step 3.5, which is the text part of transformers' Step 3.7."""

    def _with_vision(self, **sizes: Any) -> Any:
        return transformers.Step3p7Config(
            text_config=sizes, vision_config=STEP_TOWER, tie_word_embeddings=False
        )

    def _publish(self, folder: Path) -> None:
        keep_text_of_step(folder, STEP | {"architectures": [self.served_as]})

    def load(self, folder: Path) -> Any:
        text = json.loads((folder / "config.json").read_text())
        for key in ("model_type", "architectures", "auto_map"):
            del text[key]
        config = self._with_vision(**text | {"sliding_window": self.window})
        kind = transformers.Step3p7ForConditionalGeneration
        return kind.from_pretrained(folder, config=config, dtype=torch.float32).eval()


STEP_TOWER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_ratio": 2.0}
STEP_TOWER |= {"image_size": 28}
TINY["step-3.5"] = TinyStep(
    "Step3p7",
    STEP,
    ("--trust-remote-code",),
    vision={"vision_config": STEP_TOWER},
    served_as="Step3p5ForCausalLM",
    window=17,
)

WINDOWED = ("gemma-2", "gemma-3", "gemma-3-images", "olmo-3", "command-a", "exaone-4")
"""Those with sliding windows in one KV pool."""


def cpu_kernels(name: str) -> AbstractContextManager[None]:
    """Servers of a family that are started in this block have what it needs on a CPU; most need
    nothing."""
    tiny = TINY[name]
    needs_some = (tiny.served_as or tiny.model) in ON_GPUS
    return plugin("cpu_families") if needs_some else nullcontext()
