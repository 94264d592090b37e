"""Families of models: which ones PARSE serves, and how each was seen to run.

One table for start-up, ``sglang-parse doctor``, ``sglang-parse models`` and docs/models.md. Full
attention is served whatever the family. Other attention is served in families that ran on a server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_parse.attention.support import Attention

TEXTS = "texts, earlier answers, `--parse-draft-url`"
ON_CPU, READ = "on CPU servers", "by reading"
TOKEN_MODE = f"{ON_CPU}, token mode only"
ANY, UNASKED = "all", "likelihood, none"
"""Who verifies; "none" is token mode. Other attention has no head: SGLang was seen to capture other
layers of such models than it is told."""
WHY = {
    Attention.LATENT: "which PARSE was not seen to serve in this class",
    Attention.WINDOWS: "which PARSE was not seen to serve in this class",
    Attention.SPARSE: "which selects other tokens for a question than for the answer",
    Attention.STATES: "which PARSE was not seen to serve in this class",
}
"""Attention -> why a model with it is refused unless its family is in the table as seen."""


@dataclass(frozen=True, slots=True)
class Family:
    """Models of the same classes in SGLang.

    Attributes:
        name: as their publishers name them.
        architectures: of config.json; none for all other models with this attention.
        seen: how it was seen to run; "" for a family that is refused.
        draft: what can draft for it.
        judges: who can verify its answers.
    """

    name: str
    architectures: tuple[str, ...]
    attention: Attention
    seen: str = ""
    draft: str = TEXTS
    judges: str = ANY


FAMILIES = (
    Family(
        "Qwen3",
        ("Qwen3ForCausalLM",),
        Attention.FULL,
        f"{ON_CPU}, an H100 and an H200",
        "Qwen3-0.6B, Qwen3-1.7B",
    ),
    Family(
        "Llama 3, SmolLM2",
        ("LlamaForCausalLM",),
        Attention.FULL,
        f"{ON_CPU}: SmolLM2",
        "Llama-3.2-1B",
    ),
    Family(
        "Qwen3-MoE, Qwen3-Coder",
        ("Qwen3MoeForCausalLM",),
        Attention.FULL,
        TOKEN_MODE,
        "Qwen3-0.6B to 4B, Qwen3-30B-A3B",
    ),
    Family("GLM-4.5, GLM-4.6", ("Glm4MoeForCausalLM",), Attention.FULL, TOKEN_MODE, "GLM-4.5-Air"),
    Family(
        "Qwen2.5 and others with full attention",
        (),
        Attention.FULL,
        READ,
        "a small model with the same tokenizer",
    ),
    Family(
        "DeepSeek V2, V2.5, Coder V2",
        ("DeepseekV2ForCausalLM",),
        Attention.LATENT,
        ON_CPU,
        "DeepSeek-V2-Lite, DeepSeek-Coder-V2-Lite",
        UNASKED,
    ),
    Family("GLM-4.7-Flash", ("Glm4MoeLiteForCausalLM",), Attention.LATENT, ON_CPU, judges=UNASKED),
    Family("DeepSeek V3 and R1, Kimi K2, Mistral Large 3, LongCat, MiniCPM3", (), Attention.LATENT),
    Family(
        "Gemma 3, text",
        ("Gemma3ForCausalLM",),
        Attention.WINDOWS,
        ON_CPU,
        "Gemma 3 270M",
        UNASKED,
    ),
    Family(
        "Gemma 2, Gemma 3 with images, Gemma 4, gpt-oss, OLMo 3, Exaone 4, MiMo, Llama 4",
        (),
        Attention.WINDOWS,
    ),
    Family("DeepSeek V3.2 and V4, GLM-5, MiniMax M3", (), Attention.SPARSE),
    Family(
        "Qwen3.5 (dense, text), Falcon-H1",
        ("Qwen3_5ForCausalLM", "FalconH1ForCausalLM"),
        Attention.STATES,
        ON_CPU,
        judges=UNASKED,
    ),
    Family(
        "Qwen3-Next, Granite 4, LFM2",
        ("Qwen3NextForCausalLM", "GraniteMoeHybridForCausalLM", "Lfm2ForCausalLM"),
        Attention.STATES,
        TOKEN_MODE,
        judges=UNASKED,
    ),
    Family(
        "Qwen3.5 with images or experts, LFM2-MoE, Nemotron-H, Kimi Linear", (), Attention.STATES
    ),
)


HEADINGS = ("family", "attention", "judges", "layouts", "drafts", "seen")


def row(family: Family) -> tuple[str, ...]:
    """Returns a family's row of the table under ``HEADINGS``, in Markdown."""
    first = (family.name, family.attention)
    if not family.seen:
        return (*first, "", "", "", f"refused: {family.attention}, {WHY[family.attention]}")
    layouts = "`causal`, `alias`, `mask`" if family.judges == ANY else "`causal`"
    return (*first, family.judges, layouts, family.draft, family.seen)


def family_of(model: Any) -> Family:
    """Returns the family of a ``ModelConfig``: the one of its class, or "others"."""
    attention, architectures = attention_of(model), set(model.hf_config.architectures)
    alike = [one for one in FAMILIES if one.attention is attention]
    return next((one for one in alike if architectures & {*one.architectures}), alike[-1])


def attention_of(model: Any) -> Attention:
    """``model``: a ``ModelConfig``."""
    from sglang.srt.configs import model_config as sglang
    from sglang.srt.configs.hybrid_arch import mambaish_config

    config, text = model.hf_config, model.hf_text_config
    is_sparse = (sglang.is_deepseek_dsa, sglang.is_deepseek_v4, sglang.is_minimax_sparse)
    named = (getattr(text, name, None) for name in ("layer_types", "layers_block_type"))
    layers = {layer for layers in named for layer in layers or ()}
    is_ssm = mambaish_config(model) or model.attention_arch is sglang.AttentionArch.SSM
    if is_ssm or layers & {"linear_attention", "mamba"}:  # transformers' names
        return Attention.STATES
    of_minicpm = getattr(config, "has_minicpm_sparse_attention", False)
    if of_minicpm or any(is_kind(config) for is_kind in is_sparse):
        return Attention.SPARSE
    if model.attention_arch is sglang.AttentionArch.MLA:
        return Attention.LATENT
    window = getattr(text, "sliding_window", None)
    uses_window = getattr(text, "use_sliding_window", window is not None)
    has_windows = model.is_hybrid_swa or (window and uses_window)
    return Attention.WINDOWS if has_windows else Attention.FULL


def refusal(model: Any, *, is_draft: bool) -> str:
    """Describes why a ``ModelConfig`` is refused; "" if it is served."""
    family = family_of(model)
    # A draft's rows are causal. It is prefilled after the target, when a second pool's are freed.
    has_one_pool = family.attention is Attention.WINDOWS and not model.is_hybrid_swa
    found = f"a {model.hf_config.architectures[0]} with {family.attention}"
    if is_draft and family.attention is Attention.STATES:
        fix = "a server of its own with it can draft: --parse-draft-url"
        return f"{found}, whose state would have to follow what is kept of each draft ({fix})"
    if family.seen or (is_draft and has_one_pool):
        return ""
    return f"{found}, {WHY[family.attention]}"
