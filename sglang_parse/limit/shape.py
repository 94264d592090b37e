"""Shapes of models: a config.json without weights."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sglang_parse.client.demo_pair import demo_path
from sglang_parse.client.records import BenchError

SHAPES = Path(__file__).resolve().parent / "shapes"
QUESTION = SHAPES / "question.json"
"""With the tokenizer below it has as many tokens as a question in Qwen3's template."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def shape_names() -> tuple[str, ...]:
    """Names of the shapes in this repository."""
    return tuple(sorted(path.parent.name for path in SHAPES.glob("*/config.json")))


@dataclass(frozen=True)
class Shape:
    """A decoder.

    Attributes:
        config: its configuration as ``transformers`` reads it.
        vocab: number of words.
        kv_per_token: numbers in the keys and values of one token, all layers.
    """

    name: str
    folder: Path
    config: Any
    vocab: int
    kv_per_token: int

    @classmethod
    def read(cls, name: str) -> Shape:
        """A shape of this repository by its name, or the folder of any model.

        Raises:
            BenchError: there is no such shape, or ``transformers`` cannot build it.
        """
        folder = SHAPES / name if name in shape_names() else Path(name)
        if not (folder / "config.json").is_file():
            known = ", ".join(shape_names())
            raise BenchError(f"{name!r} is no shape; use {known}, or a folder with a config.json")
        from transformers import AutoConfig

        try:
            one = AutoConfig.from_pretrained(folder)
            head_dim = getattr(one, "head_dim", None) or one.hidden_size // one.num_attention_heads
            kv = 2 * one.num_hidden_layers * one.num_key_value_heads * head_dim
            return cls(folder.name, folder, one, one.vocab_size, kv)
        except (AttributeError, OSError, ValueError) as error:
            raise BenchError(f"{folder} is no decoder's: {error}; use another shape") from error

    @cached_property
    def num_weights(self) -> int:
        """Number of all parameters."""
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(self.config).num_parameters()

    def weights_bytes(self, item_bytes: int) -> int:
        """Bytes of the weights: of quantized ones one each, as in FP8, else ``item_bytes``."""
        is_quantized = getattr(self.config, "quantization_config", None) is not None
        return self.num_weights * (1 if is_quantized else item_bytes)

    def write_model(self, folder: Path) -> Path:
        """Writes a folder for ``--load-format dummy``: config and tokenizer.

        Raises:
            BenchError: the tokenizer is not there.
        """
        tokenizer = demo_path("target")  # token ids beyond its vocabulary decode to nothing
        model = folder / self.name
        model.mkdir(parents=True, exist_ok=True)
        for path in (self.folder / "config.json", *(tokenizer / name for name in TOKENIZER_FILES)):
            shutil.copy(path, model)
        return model
