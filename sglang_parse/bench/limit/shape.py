"""Shapes of models: what a config.json says about memory and arithmetic. No weights, no tensors."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from sglang_parse.bench.harness.demo_pair import demo_path
from sglang_parse.bench.harness.records import BenchError

SHAPES = Path(__file__).resolve().parent / "shapes"
QUESTION = SHAPES / "question.json"
"""As many tokens, with the tokenizer below, as a question that Qwen3 is asked by its template."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def tokenizer_folder() -> Path:
    """A small vocabulary beneath a large embedding: what has no token of its own has no text.

    Raises:
        BenchError: it is not there.
    """
    return demo_path("target")


def shape_names() -> tuple[str, ...]:
    """The shapes in this repository."""
    return tuple(sorted(path.parent.name for path in SHAPES.glob("*/config.json")))


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense decoder with gated MLPs; counts of numbers, not of bytes.

    Attributes:
        config: the config.json.
        tied: input and output embedding are one matrix.
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

    @classmethod
    def read(cls, name: str) -> Shape:
        """A shape of this repository by its name, or the folder of any model.

        Raises:
            BenchError: there is no such shape, or it is not a dense decoder.
        """
        config = (SHAPES / name if name in shape_names() else Path(name)) / "config.json"
        if not config.is_file():
            known = ", ".join(shape_names())
            raise BenchError(f"{name!r} is no shape; use {known}, or a folder with a config.json")
        content = json.loads(config.read_text(encoding="utf-8"))
        try:
            heads, hidden = content["num_attention_heads"], content["hidden_size"]
            shape = cls(
                name=Path(name).name,
                config=config,
                layers=content["num_hidden_layers"],
                hidden=hidden,
                heads=heads,
                kv_heads=content.get("num_key_value_heads", heads),
                head_dim=content.get("head_dim") or hidden // heads,
                intermediate=content["intermediate_size"],
                vocab=content["vocab_size"],
                tied=content.get("tie_word_embeddings", False),
            )
        except KeyError as error:
            raise BenchError(
                f"{config} has no {error}; use the config of a dense decoder"
            ) from error
        if any("expert" in key for key in content):
            raise BenchError(f"{config} is a mixture of experts; use the config of a dense decoder")
        return shape

    @property
    def layer_weights(self) -> int:
        """Of all layers: every token is multiplied by each."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        """Of the output embedding."""
        return self.hidden * self.vocab

    @property
    def num_weights(self) -> int:
        """All of them, norms left out."""
        return self.layer_weights + self.head_weights * (1 if self.tied else 2)

    @property
    def kv_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def write_model(self, folder: Path) -> Path:
        """A folder a server can start from with ``--load-format dummy``: config and tokenizer.

        Raises:
            BenchError: the tokenizer is not there.
        """
        tokenizer = tokenizer_folder()
        model = folder / self.name
        model.mkdir(parents=True, exist_ok=True)
        for path in (self.config, *(tokenizer / name for name in TOKENIZER_FILES)):
            shutil.copy(path, model)
        return model
