"""Tiny targets whose checkpoints have a layer for multi-token prediction (MTP)."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from support.demo_pair import DEMO
from support.families import DEEPSEEK_V3, LATENT, MOE, QUIET, UNFUSED
from support.models import load_tokenizer
from support.published import WEIGHTS
from support.random_pair import PairShape, make_pair
from support.servers import plugin

GLM = {name: size for name, size in MOE.items() if name != "moe_layer_freq"}
LOUD = 0.015
"""Of what its layers add, so that the layer, which does not see all of them, is right at times."""


@dataclass(frozen=True)
class WithMtp:
    """A family whose checkpoints have the layer.

    Attributes:
        kind: the name of its classes in transformers; ``served_as``: of SGLang's class.
        begin: what the names of the layer's weights begin with; {}: the number of layers.
        norms: the names of its norms: of the token's embedding, of the hidden states, of the end.
        project: the name of its projection.
        embeds_first: whether the embedding is the projection's first half.
        needs_kernels: whether SGLang runs it on GPUs only.
    """

    kind: str
    served_as: str
    sizes: dict
    begin: str = "model.layers.{}."
    norms: tuple[str, str, str] = ("enorm", "hnorm", "shared_head.norm")
    project: str = "eh_proj"
    embeds_first: bool = True
    needs_kernels: bool = False
    flags: tuple[str, ...] = ()

    def target(self, folder: Path) -> Path:
        """Writes a random target with the layer: a copy of its last one behind the projection."""
        config = getattr(transformers, f"{self.kind}Config")
        kind = config, getattr(transformers, f"{self.kind}ForCausalLM")
        tokenizer = load_tokenizer(DEMO / "target")
        target, _ = make_pair(folder, PairShape(seed=5), tokenizer, kind=kind, **self.sizes)
        file = target / "config.json"
        content = json.loads(file.read_text())
        content |= {"architectures": [self.served_as], "num_nextn_predict_layers": 1}
        file.write_text(json.dumps(content))
        weights = load_file(target / WEIGHTS)
        for name, weight in weights.items():
            weight.mul_(LOUD if any(part in name for part in QUIET) else 1)
        save_file(weights | self._layer(weights, content), target / WEIGHTS, {"format": "pt"})
        return target

    def _layer(self, weights: dict, config: dict) -> dict:
        number, width = config["num_hidden_layers"], config["hidden_size"]
        begin, last = self.begin.format(number), f"model.layers.{number - 1}."
        layer = {
            begin + name.removeprefix(last): weight.clone()
            for name, weight in weights.items()
            if name.startswith(last)
        }
        size = weights["model.embed_tokens.weight"].square().mean().sqrt()
        of_token, of_hidden, end = (f"{begin}{name}.weight" for name in self.norms)
        layer[of_token], layer[of_hidden] = size.repeat(width), torch.ones(width)
        layer[end] = weights["model.norm.weight"].clone()
        halves = [torch.eye(width), 0.01 * torch.randn(width, width)]
        projection = torch.cat(halves if self.embeds_first else halves[::-1], 1)
        return layer | {f"{begin}{self.project}.weight": projection}

    def kernels(self) -> AbstractContextManager[None]:
        """Servers that are started in this block have what they need on a CPU."""
        return plugin("cpu_families") if self.needs_kernels else nullcontext()


MTP = {
    "mimo-7b": WithMtp(
        "Qwen2",
        "MiMoForCausalLM",
        {"num_hidden_layers": 3},
        begin="model.mtp_layers.0.",
        norms=("token_layernorm", "hidden_layernorm", "final_layernorm"),
        project="input_proj",
        embeds_first=False,
    ),
    "glm-4.5": WithMtp(
        "Glm4Moe",
        "Glm4MoeForCausalLM",
        GLM | {"num_hidden_layers": 3, "use_qk_norm": True},
        flags=UNFUSED,
    ),
    "deepseek-v3": WithMtp(
        "DeepseekV3", "DeepseekV3ForCausalLM", DEEPSEEK_V3, needs_kernels=True, flags=UNFUSED
    ),
    "glm-4.7-flash": WithMtp(
        "Glm4MoeLite", "Glm4MoeLiteForCausalLM", LATENT, needs_kernels=True, flags=UNFUSED
    ),
}
