"""The demo draft writes several tokens a forward: what it learns that from, and how well it can.

The method is `examples/parallel_draft.py`, the recipe for any draft.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from data import encode, prompt_text
from problems import Problem
from torch.utils.data import Dataset

sys.path.append(str(Path(__file__).resolve().parents[1]))
from parallel_draft import Text, pack

BLOCK = 8
# The byte FF, which no UTF-8 text holds.
MASK_TOKEN = "ÿ"


class BlockBatches(Dataset):
    """Texts the draft wrote, masks behind some of their tokens: item `i` is a whole batch."""

    NUM_ANCHORS = 10

    def __init__(
        self,
        texts: Mapping[int, Sequence[Text]],
        mask_id: int,
        num_batches: int,
        batch_size: int,
        seed: str,
    ) -> None:
        """`texts`: by number of steps."""
        self.texts, self.mask_id = texts, mask_id
        self.num_batches, self.batch_size, self.seed = num_batches, batch_size, seed

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rng = random.Random(f"{self.seed}/{index}")
        texts = rng.sample(self.texts[rng.choice(sorted(self.texts))], self.batch_size)
        anchors = [rng.sample(text.anchors, self.NUM_ANCHORS) for text in texts]
        return pack(texts, anchors, BLOCK, self.mask_id)


def make_texts(tokenizer: Any, problems: Sequence[Problem], answers: Sequence[str]) -> list[Text]:
    """Prompts with their answers, as token ids."""
    prompts = encode(tokenizer, [prompt_text(tokenizer, p) for p in problems])
    written = encode(tokenizer, answers)
    return [Text(p + a, len(p)) for p, a in zip(prompts, written, strict=True)]
