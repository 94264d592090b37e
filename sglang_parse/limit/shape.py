"""Shapes of models: memory and arithmetic by their config.json. No weights, no tensors."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_parse.client.demo_pair import demo_path
from sglang_parse.client.records import BenchError

SHAPES = Path(__file__).resolve().parent / "shapes"
QUESTION = SHAPES / "question.json"
"""With the tokenizer below it has as many tokens as a question in Qwen3's template."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def tokenizer_folder() -> Path:
    """The demo pair's tokenizer: token ids beyond it decode to nothing. Raises: BenchError."""
    return demo_path("target")


def shape_names() -> tuple[str, ...]:
    """Names of the shapes in this repository."""
    return tuple(sorted(path.parent.name for path in SHAPES.glob("*/config.json")))


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder with gated MLPs, or with experts of that kind in every layer.

    Counts are numbers of parameters, not bytes.

    Attributes:
        config: path of the config.json.
        intermediate: width of a layer's MLP, or of one expert.
        tied: input and output embedding are one matrix.
        experts, experts_per_token: per layer, and active per token; 1 in a dense decoder.
        weight_bytes: size of a layer's weight, where the config sets it; else the dtype's.
    """

    name: str
    config: Path
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    experts: int = 1
    experts_per_token: int = 1
    weight_bytes: int | None = None

    @classmethod
    def read(cls, name: str) -> Shape:
        """A shape of this repository by its name, or the folder of any model.

        Raises:
            BenchError: there is no such shape, or it is of another kind.
        """
        config = (SHAPES / name if name in shape_names() else Path(name)) / "config.json"
        if not config.is_file():
            known = ", ".join(shape_names())
            raise BenchError(f"{name!r} is no shape; use {known}, or a folder with a config.json")
        content = json.loads(config.read_text(encoding="utf-8"))
        try:
            heads, hidden = content["num_attention_heads"], content["hidden_size"]
            return cls(
                name=Path(name).name,
                config=config,
                layers=content["num_hidden_layers"],
                hidden=hidden,
                heads=heads,
                kv_heads=content.get("num_key_value_heads", heads),
                head_dim=content.get("head_dim") or hidden // heads,
                vocab=content["vocab_size"],
                tied=content.get("tie_word_embeddings", False),
                **_experts(content, config),
                **_quantized(content, config),
            )
        except KeyError as error:
            raise BenchError(f"{config} has no {error}; use the config of a decoder") from error

    @property
    def layer_weights(self) -> int:
        """Weights of all layers."""
        return self._layer_weights(self.experts)

    @property
    def token_weights(self) -> int:
        """Weights of all layers that one token is multiplied by."""
        return self._layer_weights(self.experts_per_token)

    def touched_weights(self, num_tokens: int) -> float:
        """Weights of all layers that so many tokens need, if all experts are equally likely."""
        idle = (1 - self.experts_per_token / self.experts) ** num_tokens
        return self._layer_weights(self.experts * (1 - idle))

    def _layer_weights(self, experts: float) -> Any:
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        router = self.hidden * self.experts if self.experts > 1 else 0
        return self.layers * (attention + router + experts * 3 * self.hidden * self.intermediate)

    def weights_bytes(self, item_bytes: int, num_tokens: int | None = None) -> float:
        """Bytes of the layers (or of those that ``num_tokens`` need) and the output embedding."""
        layers = self.layer_weights if num_tokens is None else self.touched_weights(num_tokens)
        return (self.weight_bytes or item_bytes) * layers + item_bytes * self.head_weights

    @property
    def head_weights(self) -> int:
        """Weights of the output embedding."""
        return self.hidden * self.vocab

    @property
    def num_weights(self) -> int:
        """All weights except norms."""
        return self.layer_weights + self.head_weights * (1 if self.tied else 2)

    def all_bytes(self, item_bytes: int) -> int:
        """Bytes of all weights; ``item_bytes``: size of one that is not quantized."""
        embeddings = self.num_weights - self.layer_weights
        return (self.weight_bytes or item_bytes) * self.layer_weights + item_bytes * embeddings

    @property
    def kv_per_token(self) -> int:
        """Numbers in the keys and values of one token, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def write_model(self, folder: Path) -> Path:
        """Writes a folder for ``--load-format dummy``: config and tokenizer.

        Raises:
            BenchError: the tokenizer is not there.
        """
        tokenizer = tokenizer_folder()
        model = folder / self.name
        model.mkdir(parents=True, exist_ok=True)
        for path in (self.config, *(tokenizer / name for name in TOKENIZER_FILES)):
            shutil.copy(path, model)
        return model


def _experts(content: dict[str, Any], config: Path) -> dict[str, int]:
    """Returns the sizes of the MLPs. Raises: BenchError, KeyError."""
    if not any("expert" in key for key in content):
        return {"intermediate": content["intermediate_size"]}
    others = [key for key in content if "shared_expert" in key and content[key]]
    if others or content.get("mlp_only_layers") or content.get("decoder_sparse_step", 1) != 1:
        raise BenchError(
            f"{config} mixes experts with other MLPs; use a decoder with experts alone, or a dense "
            "one"
        )
    return {
        "intermediate": content["moe_intermediate_size"],
        "experts": content["num_experts"],
        "experts_per_token": content["num_experts_per_tok"],
    }


def _quantized(content: dict[str, Any], config: Path) -> dict[str, int]:
    """Raises: BenchError, for weights of an unsupported format."""
    quantization = content.get("quantization_config")
    if quantization is None:
        return {}
    if quantization.get("quant_method") != "fp8":
        raise BenchError(
            f"{config} has weights in {quantization.get('quant_method')!r}; use fp8, or none"
        )
    return {"weight_bytes": 1}
