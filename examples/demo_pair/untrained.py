"""A draft of the demo draft's shape that knows nothing: what PARSE costs where it cannot pay.

    python examples/demo_pair/untrained.py build/untrained

Random weights; config and tokenizer are the demo draft's.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

DRAFT = Path(__file__).resolve().parent / "draft"


def save_untrained(folder: Path, like: Path = DRAFT) -> Path:
    """Random weights, the same each time, with the config and tokenizer of another draft."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(like)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(like).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    print(save_untrained(parser.parse_args().folder))


if __name__ == "__main__":
    main()
