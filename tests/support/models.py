"""The servers' models in plain transformers: the reference for answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def load_model(folder: Path) -> Any:
    """In fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load_tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)
