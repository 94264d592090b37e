"""Shapes of models: a config.json without weights; heads for them."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sglang_parse.client.demo_pair import demo_path
from sglang_parse.client.program import write_json
from sglang_parse.client.records import BenchError
from sglang_parse.core.judge import FILE, WEIGHTS

SHAPES = Path(__file__).resolve().parent / "shapes"
EAGLE3_VOCAB = 32_000
"""Words that EAGLE-3 heads of large vocabularies propose."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def shape_names() -> tuple[str, ...]:
    return tuple(sorted(path.parent.name for path in SHAPES.glob("*/config.json")))


@dataclass(frozen=True)
class Shape:
    """A decoder: its configuration as ``transformers`` reads it, its number of words, and numbers
    in the keys and values of one token of all layers."""

    name: str
    folder: Path
    config: Any
    vocab: int
    kv_per_token: int

    @classmethod
    def read(cls, name: str) -> Shape:
        """A shape of this repository by its name, or the folder of any model."""
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
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(self.config).num_parameters()

    def weights_bytes(self, item_bytes: int) -> int:
        """Bytes of the weights: of quantized ones one each, as in FP8, else ``item_bytes``."""
        is_quantized = getattr(self.config, "quantization_config", None) is not None
        return self.num_weights * (1 if is_quantized else item_bytes)

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
            draft_vocab_size=min(EAGLE3_VOCAB, self.vocab),
            tie_word_embeddings=False,
            mlp_bias=False,
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
        width = self.config.hidden_size
        layers = [self.config.num_hidden_layers // 2]
        judge = folder / f"{self.name}-judge"
        write_json(judge / FILE, {**trained, "layers": layers, "hidden_size": width})
        weights = {"weights": torch.randn(2, width), "scalars": torch.ones(2)}
        save_file({**weights, "bias": torch.zeros(1)}, judge / WEIGHTS)
        return judge
