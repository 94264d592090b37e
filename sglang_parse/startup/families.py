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
ANY, UNREAD, UNASKED = "all", "question, likelihood, none", "likelihood, none"
HEADED = "head, likelihood, none"
"""Who verifies; "none" is token mode. ``UNREAD``: no head, as SGLang captures no layers, or other
states than their outputs. ``HEADED``: no questions."""
WINDOWLESS = (
    *("MistralForCausalLM", "Phi3ForCausalLM", "MixtralForCausalLM"),
    *("Ministral3ForCausalLM", "PhiMoEForCausalLM", "Starcoder2ForCausalLM"),
)
"""Classes of SGLang that give no layer the window of config.json."""
UNSEEN = "which PARSE was not seen to serve"
GPUS_ONLY = f"{UNSEEN}: SGLang runs it on GPUs only"
MTP = "with SGLang's own --speculative-algorithm EAGLE, which drafts with its MTP layer"
"""How a model is served instead, where PARSE does not."""


@dataclass(frozen=True, slots=True)
class Family:
    """Models of the same classes in SGLang.

    Attributes:
        name: as their publishers name them.
        architectures: of config.json; none for all other models with this attention.
        seen: how it was seen to run; "" for a family that is refused.
        draft: what can draft for it.
        judges: who can verify its answers.
        why: it is refused; ``instead``: what serves it.
    """

    name: str
    architectures: tuple[str, ...]
    attention: Attention
    seen: str = ""
    draft: str = TEXTS
    judges: str = ANY
    why: str = f"{UNSEEN} in this class"
    instead: str = ""

    @property
    def is_asked(self) -> bool:
        return self.judges in (ANY, UNREAD)


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
    Family("GLM-4.5 to 4.7", ("Glm4MoeForCausalLM",), Attention.FULL, TOKEN_MODE, "GLM-4.5-Air"),
    Family("MiMo-7B", ("MiMoForCausalLM",), Attention.FULL, TOKEN_MODE),
    Family("Ernie 4.5 with experts", ("Ernie4_5_MoeForCausalLM",), Attention.FULL, TOKEN_MODE),
    Family("Qwen2.5", ("Qwen2ForCausalLM",), Attention.FULL, ON_CPU, "Qwen2.5-0.5B, Coder-0.5B"),
    Family(
        "others with full attention",
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
    ),
    Family(
        "DeepSeek V3 and R1, Kimi K2, Kimi K2.5",
        ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"),
        Attention.LATENT,
        ON_CPU,
    ),
    Family(
        "Mistral Large 3",
        ("PixtralForConditionalGeneration",),
        Attention.LATENT,
        f"{ON_CPU}, in fp32 where SGLang always takes bf16",
        judges=UNREAD,
    ),
    Family("GLM-4.7-Flash", ("Glm4MoeLiteForCausalLM",), Attention.LATENT, ON_CPU),
    Family("MiniCPM3", ("MiniCPM3ForCausalLM",), Attention.LATENT, ON_CPU, judges=UNREAD),
    Family(
        "LongCat-Flash",
        ("LongcatFlashForCausalLM",),
        Attention.LATENT,
        why="whose class SGLang cannot build where config.json scales no positions",
    ),
    Family("DeepSeek-VL2, Kimi-VL and others", (), Attention.LATENT),
    Family(
        "Gemma 3",
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        Attention.WINDOWS,
        ON_CPU,
        "Gemma 3 270M, 1B or 4B",
        UNREAD,
    ),
    Family("Gemma 2", ("Gemma2ForCausalLM",), Attention.WINDOWS, ON_CPU, "Gemma 2 2B", UNREAD),
    Family("OLMo 3", ("Olmo2ForCausalLM",), Attention.WINDOWS, ON_CPU, "OLMo 3 7B", UNREAD),
    Family(
        "Command A, Command R7B",
        ("Cohere2ForCausalLM",),
        Attention.WINDOWS,
        ON_CPU,
        "Command R7B",
        UNREAD,
    ),
    Family(
        "EXAONE 4", ("Exaone4ForCausalLM",), Attention.WINDOWS, ON_CPU, "EXAONE 4.0 1.2B", UNREAD
    ),
    Family("K-EXAONE and others with sliding windows", (), Attention.WINDOWS),
    Family(
        "gpt-oss",
        ("GptOssForCausalLM",),
        Attention.POOLS,
        ON_CPU,
        f"gpt-oss-20b, which saves little; {TEXTS}",
        UNASKED,
    ),
    Family(
        "Gemma 4, text",
        ("Gemma4ForConditionalGeneration",),
        Attention.POOLS,
        ON_CPU,
        "Gemma 4 E2B, E4B",
        UNASKED,
    ),
    Family(
        "Granite Swash, Laguna, Mellum 2, MiMo-V2-Flash, Step 3.5 Flash",
        (
            *("GraniteSWAForCausalLM", "LagunaForCausalLM", "MellumForCausalLM"),
            *("MiMoV2FlashForCausalLM", "Step3p5ForCausalLM"),
        ),
        Attention.POOLS,
        ON_CPU,
        judges=UNASKED,
    ),
    Family("MiMo-V2.5, Step 3.7 and others with such windows", (), Attention.POOLS),
    Family("Llama 4", ("Llama4ForConditionalGeneration",), Attention.CHUNKS, why=GPUS_ONLY),
    Family(
        "DeepSeek V4",
        ("DeepseekV4ForCausalLM",),
        Attention.SPARSE,
        why="whose compressed KV has states of a request that cannot return to an earlier token",
        instead=MTP,
    ),
    Family(
        "MiniMax M3",
        ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration"),
        Attention.SPARSE,
        why=GPUS_ONLY,
    ),
    Family(
        "DeepSeek V3.2, GLM-5",
        ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"),
        Attention.SPARSE,
        why=GPUS_ONLY,
        instead=MTP,
    ),
    Family(
        "Qwen3.5, Qwen3.6, dense or with experts",
        (
            *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
            *("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
        ),
        Attention.STATES,
        ON_CPU,
        "Qwen3.5-0.8B behind `--parse-draft-url`, texts, earlier answers",
        HEADED,
    ),
    Family(
        "Qwen3-Next, Nemotron-H, Nemotron 3",
        ("Qwen3NextForCausalLM", "NemotronHForCausalLM"),
        Attention.STATES,
        ON_CPU,
        judges=HEADED,
    ),
    Family(
        "LFM2, LFM2-MoE",
        ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM"),
        Attention.STATES,
        ON_CPU,
        judges=HEADED,
    ),
    Family(
        "Granite 4, Falcon-H1, Kimi Linear",
        ("GraniteMoeHybridForCausalLM", "FalconH1ForCausalLM", "KimiLinearForCausalLM"),
        Attention.STATES,
        ON_CPU,
        judges=UNASKED,
    ),
    Family("Ling 2.5 and other hybrids", (), Attention.STATES),
)

NOT_ON_CPU = {
    *("Gemma2ForCausalLM", "Exaone4ForCausalLM"),
    *("GptOssForCausalLM", "Gemma4ForConditionalGeneration", "Ernie4_5_MoeForCausalLM"),
    *(
        name
        for family in FAMILIES
        if family.attention in (Attention.LATENT, Attention.STATES)
        for name in family.architectures
    ),
}
"""Classes that SGLang runs on GPUs only, or gives other tokens on a CPU. The tests' servers, which
bring kernels for them (``tests/support/plugins/cpu_families``), have none."""

WITH_MTP = {
    *("Glm4MoeForCausalLM", "MiMoForCausalLM", "Ernie4_5_MoeForCausalLM"),
    *("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"),
    *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
    *("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    *("Qwen3NextForCausalLM", "NemotronHForCausalLM"),
}
"""Those whose checkpoints may have a layer for multi-token prediction (MTP) that drafts."""

HEADINGS = ("family", "attention", "judges", "layouts", "drafts", "MTP layer", "seen")


def row(family: Family) -> tuple[str, ...]:
    """Returns a family's row of the table under ``HEADINGS``, in Markdown."""
    first = (family.name, family.attention)
    if not family.seen:
        return (*first, "", "", "", "", f"refused: {family.attention}, {family.why}")
    layouts = "`causal`, `alias`" if family.is_asked else "`causal`"
    if family.is_asked and family.attention is not Attention.WINDOWS:
        layouts += ", `mask`"
    mtp = "" if WITH_MTP.isdisjoint(family.architectures) else "`--parse-mtp own`"
    return (*first, family.judges, layouts, family.draft, mtp, family.seen)


def family_of(model: Any) -> Family:
    """Returns the family of a ``ModelConfig``: the one of its class, or "others"."""
    attention, architectures = attention_of(model), set(model.hf_config.architectures)
    if attention is Attention.WINDOWS and _may_have_pools(model):
        attention = Attention.POOLS  # ``--disable-hybrid-swa-memory`` makes one of them
    alike = [one for one in FAMILIES if one.attention is attention]
    return next((one for one in alike if architectures & {*one.architectures}), alike[-1])


def usual_drafts(model: Any) -> str:
    """What can draft for a ``ModelConfig``, by its family."""
    family = family_of(model)
    return f"for {family.name}: {family.draft}"


def lacks_cpu(model: Any, device: str | None) -> bool:
    """Whether the device is a CPU, and the ``ModelConfig`` one that no CPU serves."""
    return device == "cpu" and not NOT_ON_CPU.isdisjoint(model.hf_config.architectures)


def instead_of(model: Any, device: str | None) -> str:
    """What to do instead of serving a ``ModelConfig`` that is refused."""
    if family_of(model).seen and lacks_cpu(model, device):
        return "start it on a GPU, or use a model with full attention"
    how = family_of(model).instead or "without --speculative-algorithm PARSE"
    return f"use a model that `sglang-parse models` lists as seen, or this one {how}"


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
    # No layer of MiMo has the chunks of its config.json.
    is_mimo = not {*config.architectures}.isdisjoint(sglang.MIMO_V2_MODEL_ARCHS)
    if getattr(text, "attention_chunk_size", None) and not is_mimo:
        return Attention.CHUNKS
    if model.is_hybrid_swa:
        return Attention.POOLS
    window = getattr(text, "sliding_window", None)
    uses_window = getattr(text, "use_sliding_window", window is not None)
    uses_window = uses_window and not {*config.architectures} & {*WINDOWLESS}
    has_windows = _may_have_pools(model) or (window and uses_window)
    has_windows = has_windows or getattr(text, "loop_window_size", None)  # of later passes
    return Attention.WINDOWS if has_windows else Attention.FULL


def _may_have_pools(model: Any) -> bool:
    """Whether SGLang gives the class two KV pools unless ``--disable-hybrid-swa-memory`` is set."""
    from sglang.srt.configs.model_config import is_hybrid_swa_model

    return is_hybrid_swa_model(model.hf_config.architectures, model.hf_text_config)


def refusal(model: Any, device: str | None, *, is_draft: bool) -> str:
    """Describes why a ``ModelConfig`` is refused on a device; "" if it is served."""
    family = family_of(model)
    name = model.hf_config.architectures[0]
    known = f"{name} ({family.name})" if name in family.architectures else name
    found = f"a {known} with {family.attention}"
    if is_draft and family.attention is Attention.STATES:
        fix = "a server of its own with it can draft: --parse-draft-url"
        return f"{found}, whose state would have to follow what is kept of each draft ({fix})"
    # A draft's rows are causal, and its KV is in one pool (the patch ``draft_models``).
    if family.seen or (is_draft and family.attention in (Attention.WINDOWS, Attention.POOLS)):
        return f"{found}, which SGLang runs on GPUs" if lacks_cpu(model, device) else ""
    return f"{found}, {family.why}"
