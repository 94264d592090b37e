"""A random target and a noisy copy of it as draft: diverse text, partial agreement, no training.

Untied embeddings, because a random tied model repeats one token and then every draft is right.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from support.demo_pair import DEMO
from support.models import load_tokenizer

MASK_ID = 310
"""No prompt of the tests has it; both models may write it, as any token."""


@dataclass(frozen=True)
class PairShape:
    """Size and noise of a random pair; ``noise`` 0 makes the draft equal to the target."""

    num_layers: int = 2
    hidden: int = 64
    head_dim: int = 16
    noise: float = 0.02
    seed: int = 0
    max_positions: int = 4096


def make_pair(
    folder: Path,
    shape: PairShape = PairShape(),
    tokenizer: Any = None,
    kind: tuple[Callable[..., Any], Callable[..., Any]] = (Qwen3Config, Qwen3ForCausalLM),
    **sizes: object,
) -> tuple[Path, Path]:
    """Write ``target`` and ``draft`` folders (weights in fp32, by default the question pair's
    tokenizer); ``kind``: their configuration, which ``sizes`` adds to, and model."""
    tokenizer = tokenizer or load_tokenizer(DEMO / "target")
    torch.manual_seed(shape.seed)
    config = {
        "vocab_size": len(tokenizer),
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model = kind[1](kind[0](**config | sizes))
    paths = []
    for name, noise in (("target", 0.0), ("draft", shape.noise)):
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.add_(torch.randn_like(parameter) * parameter.std() * noise)
                if key.endswith("sinks"):
                    parameter.copy_(parameter.bfloat16())  # as SGLang stores them
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        paths.append(folder / name)
    return paths[0], paths[1]


def resize(model: Path, rows: int, scale: float = 4.0) -> Path:
    """Gives a saved model an embedding of so many tokens, as publishers do who pad it. What is
    behind its last token is random and, with this ``scale``, what it would often choose."""
    torch.manual_seed(rows)
    file, weights = model / "model.safetensors", load_file(model / "model.safetensors")
    for name in sorted({"model.embed_tokens.weight", "lm_head.weight"} & weights.keys()):
        found = weights[name]
        more = torch.randn(max(0, rows - len(found)), found.shape[1]) * found.std() * scale
        weights[name] = torch.cat((found[:rows], more.to(found.dtype)))
    save_file(weights, file, {"format": "pt"})
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": rows}))
    return model


def parallel_draft(model: Path, folder: Path) -> Path:
    """``model`` as a draft of PARD's form: config.json names the token that stands for a mask.

    It was never taught to fill masks: hardly a candidate is right.
    """
    shutil.copytree(model, folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pard_token": MASK_ID}))
    return folder
