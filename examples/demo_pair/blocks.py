"""The demo draft writes several tokens a forward: what it learns that from, and how well it can.

The method is `examples/parallel_draft.py`, the recipe for any draft.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from data import FIRST, STYLES, encode, prompt_text
from json_answers import WISH, write_json
from problems import Problem, write_lines
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
        self, texts: Sequence[Text], mask_id: int, num_batches: int, batch_size: int, seed: str
    ) -> None:
        """Texts of like length go together; those too short for their anchors are left out."""
        long = [text for text in texts if len(text.anchors) >= self.NUM_ANCHORS]
        self.texts = sorted(long, key=lambda text: len(text.ids))
        self.mask_id = mask_id
        self.num_batches, self.batch_size, self.seed = num_batches, batch_size, seed

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rng = random.Random(f"{self.seed}/{index}")
        first = rng.randint(0, len(self.texts) - 4 * self.batch_size)
        texts = rng.sample(self.texts[first : first + 4 * self.batch_size], self.batch_size)
        anchors = [rng.sample(text.anchors, self.NUM_ANCHORS) for text in texts]
        return pack(texts, anchors, BLOCK, self.mask_id)


def make_texts(
    tokenizer: Any, problems: Sequence[Problem], answers: Sequence[str], given: Sequence[str] = ()
) -> list[Text]:
    """Prompts with their answers, as token ids; `given` beginnings count as prompt."""
    begun = zip(problems, given or [""] * len(problems), strict=True)
    prompts = encode(tokenizer, [begun_text(tokenizer, p, start) for p, start in begun])
    written = encode(tokenizer, answers)
    return [Text(p + a, len(p)) for p, a in zip(prompts, written, strict=True)]


def begun_text(tokenizer: Any, problem: Problem, start: str) -> str:
    """The prompt and the beginning of an answer; the user wished JSON if it begins so."""
    return prompt_text(tokenizer, problem, WISH if start.startswith("{") else "") + start


def begin_answer(problem: Problem, rng: random.Random, json_share: float) -> str:
    """In half of the cases the target's first token, else some lines, others' among them."""
    in_json = rng.random() < json_share
    if rng.random() < 0.5:
        return "{" if in_json else FIRST
    weights = rng.choice(((1.0, 0.0, 0.0), (0.0, 0.0, 1.0), (0.4, 0.4, 0.2)))
    lines = [line for _, line in write_lines(problem, rng, STYLES, weights)]
    lines = write_json(lines) if in_json else lines
    return "".join(lines[: rng.randint(1, len(lines) - 3)])
