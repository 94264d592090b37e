"""A LoRA adapter of random weights for the tests."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

RANK = 4


def make_adapter(folder: Path, model: Path, *, scale: float, seed: int) -> Path:
    """A random adapter, in PEFT's format; a ``scale`` of 0.3 changes nearly every token."""
    config = AutoConfig.from_pretrained(model)
    widths = {
        "q_proj": config.num_attention_heads * config.head_dim,
        "v_proj": config.num_key_value_heads * config.head_dim,
    }
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config.num_hidden_layers):
        for name, width in widths.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            shapes = {"lora_A": (RANK, config.hidden_size), "lora_B": (width, RANK)}
            for part, shape in shapes.items():
                weights[f"{stem}.{part}.weight"] = scale * torch.randn(shape, generator=generator)
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(widths),
    }
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return folder


def two_adapters(target: Path, folder: Path) -> tuple[str, ...]:
    """Two adapters of a target, and the flags that serve them."""
    loud = make_adapter(folder / "loud", target, scale=0.3, seed=5)
    quiet = make_adapter(folder / "quiet", target, scale=0.06, seed=6)
    return (
        *("--enable-lora", "--lora-paths", f"loud={loud}", f"quiet={quiet}"),
        *("--lora-backend", "torch_native", "--max-loras-per-batch", "3"),
    )
