"""Shapes of models: a config.json without weights; heads for them."""

from __future__ import annotations

import json
import operator
import re
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang_parse.client.demo_pair import demo_path
from sglang_parse.client.program import write_json
from sglang_parse.client.records import BenchError
from sglang_parse.core.judge import FILE, WEIGHTS
from sglang_parse.shapes.mixer import Mixer, mixer_of

SHAPES = Path(__file__).resolve().parent / "configs"
EAGLE3_VOCAB = 32_000
"""Words that EAGLE-3 heads of large vocabularies propose."""
BYTES = {"fp8": (1, 1), "mxfp4": (2, 4.25 / 8)}
"""How a checkpoint is quantized -> bytes of a weight of attention, and of an MLP or expert."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def shape_names() -> tuple[str, ...]:
    return tuple(sorted(path.parent.name for path in SHAPES.glob("*/config.json")))


@dataclass(frozen=True)
class Shape:
    """A decoder with gated MLPs; numbers as in its config.json.

    Attributes:
        intermediate_size: of an MLP, or of each of ``num_experts``, of which a token uses
            ``experts_per_token``; ``dense_size``: of the MLP of the first ``dense_layers``, and
            ``shared_size`` of what every token of the others uses, too.
        quantization: a key of ``BYTES``; "": none.
    """

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    mixer: Mixer
    vocab_size: int
    tie_word_embeddings: bool
    num_experts: int = 1
    experts_per_token: int = 1
    dense_layers: int = 0
    dense_size: int = 0
    shared_size: int = 0
    quantization: str = ""
    name: str = field(default="", compare=False)
    folder: Path = field(default=Path(), compare=False)

    @classmethod
    def read(cls, name: str) -> Shape:
        """A shape of this repository by its name, Qwen3's by their size alone (14b, 0.6b); or a
        model's folder or config.json."""
        short = f"qwen3_{re.sub('[.-]', '_', name)}"
        path = next((SHAPES / one for one in (name, short) if one in shape_names()), Path(name))
        try:
            return cls._of(path / "config.json" if path.is_dir() else path)
        except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
            known = f"use {', '.join(shape_names())}, or a decoder's config.json"
            raise BenchError(f"{name!r} gives no shape ({error!r}); {known}") from error

    @classmethod
    def _of(cls, file: Path) -> Shape:
        config = json.loads(file.read_text(encoding="utf-8"))
        quantization = (config.get("quantization_config") or {}).get("quant_method", "")
        if quantization and quantization not in BYTES:
            raise ValueError(f"quant_method {quantization!r} is none of {', '.join(BYTES)}")
        config = config.get("text_config", config)  # of a model that sees images
        experts = next((config[key] for key in EXPERTS if config.get(key)), 1)
        dense_size = config["intermediate_size"]
        size = config.get("moe_intermediate_size", dense_size)
        return cls(
            num_hidden_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            intermediate_size=size,
            mixer=mixer_of(config),
            vocab_size=config["vocab_size"],
            tie_word_embeddings=bool(config.get("tie_word_embeddings")),
            num_experts=experts,
            experts_per_token=config["num_experts_per_tok"] if experts > 1 else 1,
            dense_layers=config.get("first_k_dense_replace") or 0,
            dense_size=dense_size,
            shared_size=size * (config.get("n_shared_experts") or 0),
            quantization=quantization,
            name=file.parent.name,
            folder=file.parent,
        )

    def layers(self, num_layers: int) -> Shape:
        """So many of its last layers."""
        return replace(self, num_hidden_layers=num_layers, dense_layers=0)

    def parts(self, num_experts: float) -> tuple[float, float]:
        """Weights of all layers with so many of their experts: attention's, and those of MLPs or
        experts; without norms and routers."""
        sparse = self.num_hidden_layers - self.dense_layers
        size = sparse * (num_experts * self.intermediate_size + self.shared_size)
        return (
            self.num_hidden_layers * self.mixer.weights,
            3 * self.hidden_size * (size + self.dense_layers * self.dense_size),
        )

    def body_bytes(self, num_experts: float, item_bytes: int) -> float:
        """Of the same weights, in ``item_bytes`` each where they are not quantized."""
        each = BYTES.get(self.quantization, (item_bytes, item_bytes))
        return sum(map(operator.mul, self.parts(num_experts), each))

    @property
    def lm_head(self) -> int:
        return self.hidden_size * self.vocab_size

    @property
    def kv_per_token(self) -> int:
        """Numbers in the keys and values of one token, all layers."""
        return round(self.num_hidden_layers * self.mixer.kv)

    @property
    def state_bytes(self) -> int:
        """Of one request, all layers."""
        return round(self.num_hidden_layers * self.mixer.state_bytes)

    def num_bytes(self, item_bytes: int, kv_tokens: int = 0) -> float:
        """Bytes of the weights, in ``item_bytes`` each where they are not quantized, and of the KV
        of some tokens."""
        tables = self.lm_head * (1 if self.tie_word_embeddings else 2)  # the embedding's, too
        others = tables + kv_tokens * self.kv_per_token
        return self.body_bytes(self.num_experts, item_bytes) + item_bytes * others

    def write_model(self, folder: Path, **changes: Any) -> Path:
        """Writes a folder for ``--load-format dummy`` below that of all models: the tokenizer, and
        the config with changed keys."""
        tokenizer = demo_path("target")  # token ids beyond its vocabulary decode to nothing
        model = folder / self.name
        model.mkdir(parents=True, exist_ok=True)
        for name in TOKENIZER_FILES:
            shutil.copy(tokenizer / name, model)
        config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        write_json(model / "config.json", {**config, **changes})
        return model

    def write_eagle3(self, folder: Path) -> Path:
        """Writes the folder of an EAGLE-3 head for this target: a layer of its width."""
        head = replace(self, name=f"{self.name}-eagle3")
        return head.write_model(
            folder,
            architectures=["LlamaForCausalLMEagle3"],
            model_type="llama",
            num_hidden_layers=1,
            draft_vocab_size=min(EAGLE3_VOCAB, self.vocab_size),
            tie_word_embeddings=False,
            mlp_bias=False,
            quantization_config=None,
        )

    def write_dflash(self, folder: Path) -> Path:
        """Writes the folder of a DFLASH draft for this target: five layers of its width, which read
        as many of its layers, and blocks of 16."""
        draft, layers = replace(self, name=f"{self.name}-dflash"), self.num_hidden_layers
        read = sorted({1 + place * (layers - 2) // 4 for place in range(5)}) if layers > 2 else [0]
        return draft.write_model(
            folder,
            architectures=["DFlashDraftModel"],
            num_hidden_layers=5,
            layer_types=None,
            num_target_layers=layers,
            block_size=16,
            dflash_config={"mask_token_id": self.vocab_size - 1, "target_layer_ids": read},
            quantization_config=None,
        )

    def write_judge(self, folder: Path, target: Path, draft: Path) -> Path:
        """Writes the folder of a verdict head for these models: one layer, random weights."""
        import torch
        from safetensors.torch import save_file

        from sglang_parse.startup.certificates import model_digest

        trained = json.loads((demo_path("judge") / FILE).read_text(encoding="utf-8"))
        models = {"target": model_digest(str(target)), "draft": model_digest(str(draft))}
        trained["fingerprint"] |= models
        width, layers = self.hidden_size, [self.num_hidden_layers // 2]
        judge = folder / f"{self.name}-judge"
        write_json(judge / FILE, {**trained, "layers": layers, "hidden_size": width})
        weights = {"weights": torch.randn(2, width), "scalars": torch.ones(2)}
        save_file({**weights, "bias": torch.zeros(1)}, judge / WEIGHTS)
        return judge
