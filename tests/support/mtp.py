"""Tiny targets whose checkpoints have a layer for multi-token prediction (MTP)."""

from __future__ import annotations

import copy
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from support.demo_pair import DEMO
from support.families import DEEPSEEK_V3, LATENT, MOE, QUIET, TINY, UNFUSED, TinyHybrid
from support.models import load_tokenizer
from support.published import WEIGHTS
from support.random_pair import PairShape, make_pair
from support.servers import OVERLAP, plugin

GLM = {name: size for name, size in MOE.items() if name != "moe_layer_freq"}
LOUD = 0.015
"""Of what its layers add, so that the layer, which does not see all of them, is right at times."""
BLOCK = re.compile(r".*\.layers\.(\d+)\.(.*)")


def ending(weights: dict[str, torch.Tensor], *ends: str) -> torch.Tensor:
    """The only weight whose name ends so."""
    (found,) = (weight for name, weight in weights.items() if name.endswith(ends))
    return found


@dataclass(frozen=True, kw_only=True)
class WithMtp(ABC):
    """A family whose checkpoints have the layer.

    Attributes:
        begin: what the names of the layer's weights begin with; {}: the number of layers.
        inner: what follows in those of its blocks; {}: the block's number.
        depth: how many blocks it has, copies of the target's last ones.
        norms: the names of its norms: of the token's embedding, of the hidden states, and of the
            end where it has one.
        project: the name of its projection.
        embeds_first: whether the embedding is the projection's first half.
        norm_offset: what is added to the weights of a norm.
        published: keys of config.json that transformers does not write so.
        needs_kernels: whether SGLang runs it on GPUs only.
        flags: of its servers; ``overlap``: of those with PARSE; ``variables``: their environment.
    """

    begin: str = "model.layers.{}."
    inner: str = ""
    depth: int = 1
    norms: tuple[str, ...] = ("enorm", "hnorm", "shared_head.norm")
    project: str = "eh_proj"
    embeds_first: bool = True
    norm_offset: float = 0.0
    published: dict[str, Any] = field(default_factory=dict)
    needs_kernels: bool = False
    flags: tuple[str, ...] = ()
    overlap: tuple[str, ...] = OVERLAP
    variables: dict[str, str] = field(default_factory=dict)

    @abstractmethod
    def write(self, folder: Path) -> Path:
        """Writes a random target without the layer."""

    def target(self, folder: Path) -> Path:
        """Writes a random target with the layer: copies of its last ones behind the projection."""
        target = self.write(folder)
        file, weights = target / "config.json", load_file(target / WEIGHTS)
        file.write_text(json.dumps(json.loads(file.read_text()) | self.published))
        save_file(weights | self._layer(weights), target / WEIGHTS, {"format": "pt"})
        return target

    def _layer(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = [(name, match) for name in weights if (match := BLOCK.fullmatch(name))]
        number = 1 + max(int(match[1]) for _, match in found)
        begin, first = self.begin.format(number), number - self.depth
        layer = {
            begin + self.inner.format(int(match[1]) - first) + match[2]: weights[name].clone()
            for name, match in found
            if int(match[1]) >= first
        }
        embedding = ending(weights, "embed_tokens.weight", "embeddings.weight")
        width, size = embedding.shape[1], embedding.square().mean().sqrt()
        of_token, of_hidden, *ends = (f"{begin}{name}.weight" for name in self.norms)
        layer[of_token] = size.repeat(width) - self.norm_offset
        layer[of_hidden] = torch.ones(width) - self.norm_offset
        last = ending(weights, "model.norm.weight", "norm_f.weight")
        layer |= {end: last.clone() for end in ends}
        halves = [torch.eye(width), 0.01 * torch.randn(width, width)]
        projection = torch.cat(halves if self.embeds_first else halves[::-1], 1)
        return layer | {f"{begin}{self.project}.weight": projection}

    def kernels(self) -> AbstractContextManager[None]:
        """Servers that are started in this block have what they need on a CPU."""
        return plugin("cpu_families") if self.needs_kernels else nullcontext()


@dataclass(frozen=True)
class Attending(WithMtp):
    """One with full or latent attention.

    Attributes:
        kind: the name of its classes in transformers; ``served_as``: of SGLang's class.
    """

    kind: str
    served_as: str
    sizes: dict

    def write(self, folder: Path) -> Path:
        config = getattr(transformers, f"{self.kind}Config")
        kind = config, getattr(transformers, f"{self.kind}ForCausalLM")
        tokenizer = load_tokenizer(DEMO / "target")
        target, _ = make_pair(folder, PairShape(seed=5), tokenizer, kind=kind, **self.sizes)
        file, weights = target / "config.json", load_file(target / WEIGHTS)
        content = json.loads(file.read_text()) | {"architectures": [self.served_as]}
        file.write_text(json.dumps(content | {"num_nextn_predict_layers": 1}))
        for name, weight in weights.items():
            weight.mul_(LOUD if any(part in name for part in QUIET) else 1)
        save_file(weights, target / WEIGHTS, {"format": "pt"})
        return target


@dataclass(frozen=True)
class Hybrid(WithMtp):
    """A hybrid of ``TINY``, whose servers keep states in fp32 and may retract often."""

    name: str
    _: KW_ONLY
    begin: str = "mtp."
    inner: str = "layers.{}."
    needs_kernels: bool = True
    flags: tuple[str, ...] = TinyHybrid.flags
    overlap: tuple[str, ...] = ()
    variables: dict[str, str] = field(
        default_factory=lambda: {
            "SGLANG_MAMBA_CONV_DTYPE": "float32",
            "SGLANG_TEST_RETRACT_INTERVAL": "5",
        }
    )

    def write(self, folder: Path) -> Path:
        return TINY[self.name].pair(folder)[0]


@dataclass(frozen=True, kw_only=True)
class OfQwen(Hybrid):
    norms: tuple[str, ...] = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    project: str = "fc"
    norm_offset: float = 1.0


class LayerReference:
    """A hybrid's layer in plain PyTorch, its blocks those of transformers: SGLang's own NEXTN
    serves no hybrid on a CPU."""

    def __init__(self, one: Hybrid, target: Path) -> None:
        whole, blocks = (TINY[one.name].load(target) for _ in range(2))
        self._target, self._blocks = whole.get_decoder(), blocks.get_decoder()
        self._head, config = whole.get_output_embeddings(), copy.deepcopy(self._blocks.config)
        self._blocks.layers = self._blocks.layers[-one.depth :]
        config.num_hidden_layers, config.layer_types = one.depth, config.layer_types[-one.depth :]
        self._blocks.config = config
        weights = load_file(target / WEIGHTS)
        norms = [weights[f"{one.begin}{name}.weight"] + one.norm_offset for name in one.norms[:2]]
        self._norms, self._project = norms, weights[f"{one.begin}{one.project}.weight"]
        self._epsilon = getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon

    @torch.no_grad()
    def hidden(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[tokens, width] the target's states behind its last norm."""
        ids = torch.tensor([token_ids])
        return self._target(input_ids=ids, use_cache=False).last_hidden_state[0]

    @torch.no_grad()
    def propose(self, hidden: torch.Tensor, token_ids: Sequence[int], length: int) -> list[int]:
        """``length`` tokens behind ``token_ids``, whose states but for the last one are
        ``hidden``."""
        tokens = [*token_ids[1:]]
        for _ in range(length):
            embedded = self._target.get_input_embeddings()(torch.tensor(tokens))
            parts = [
                torch.nn.functional.rms_norm(part, norm.shape, norm, self._epsilon)
                for part, norm in zip((embedded, hidden), self._norms, strict=True)
            ]
            rows = torch.cat(parts, 1) @ self._project.T
            made = self._blocks(inputs_embeds=rows[None], use_cache=False).last_hidden_state[0]
            hidden = torch.cat((hidden, made[-1:]))
            tokens.append(int(self._head(made[-1]).argmax()))
        return tokens[len(token_ids) - 1 :]


MTP: dict[str, WithMtp] = {
    "mimo-7b": Attending(
        "Qwen2",
        "MiMoForCausalLM",
        {"num_hidden_layers": 3},
        begin="model.mtp_layers.0.",
        norms=("token_layernorm", "hidden_layernorm", "final_layernorm"),
        project="input_proj",
        embeds_first=False,
    ),
    "glm-4.5": Attending(
        "Glm4Moe",
        "Glm4MoeForCausalLM",
        GLM | {"num_hidden_layers": 3, "use_qk_norm": True},
        flags=UNFUSED,
    ),
    "deepseek-v3": Attending(
        "DeepseekV3", "DeepseekV3ForCausalLM", DEEPSEEK_V3, needs_kernels=True, flags=UNFUSED
    ),
    "glm-4.7-flash": Attending(
        "Glm4MoeLite", "Glm4MoeLiteForCausalLM", LATENT, needs_kernels=True, flags=UNFUSED
    ),
    "ernie-4.5": Attending(
        "Ernie4_5_Moe",
        "Ernie4_5_MoeForCausalLM",
        # The layer is dense, and so is the last one.
        {"num_hidden_layers": 3, "moe_layer_start_index": 1, "moe_layer_end_index": 1}
        | {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1}
        | {"moe_intermediate_size": 48},
        begin="model.mtp_",
        inner="block.0.",
        norms=("emb_norm.0", "hidden_norm.0"),
        project="linear_proj.0",
        needs_kernels=True,
        flags=UNFUSED,
    ),
    "qwen3.5": OfQwen("qwen3.5-images"),
    "qwen3.5-moe": OfQwen("qwen3.5-moe-images"),
    "qwen3-next": OfQwen("qwen3-next"),
    "nemotron-3": Hybrid(
        "nemotron-3",
        depth=2,
        norms=("layers.0.enorm", "layers.0.hnorm", "layers.1.final_layernorm"),
        project="layers.0.eh_proj",
        published={"mtp_layers_block_type": ["attention", "moe"]},
        flags=TINY["nemotron-3"].flags,
    ),
}
HYBRIDS = {name: one for name, one in MTP.items() if isinstance(one, Hybrid)}
