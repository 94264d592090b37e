"""Training batches, each made from its index alone: seeded, resumable, nothing stored."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from documents import Line, as_json, write_document
from json_answers import WISH
from problems import ANY, LABELS, SIGNS, WORDS, Problem, Style
from torch.utils.data import Dataset

IGNORE = -100
STYLES = (SIGNS, WORDS, ANY)
FIRST = f"{LABELS[0][0]}: "
"""The target's first token, with which every served draft starts."""
Texts = Mapping[tuple[float, ...], float]
"""Kinds of texts: shares of `STYLES` among a text's lines -> share of such texts."""


def prompt_text(tokenizer: Any, problem: Problem, wish: str = "") -> str:
    """The problem as one user turn, the assistant's turn opened."""
    turns = [{"role": "user", "content": problem.text + wish}]
    return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)


def encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, special tokens in the text honoured, none added."""
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"]


def digit_ids(tokenizer: Any) -> torch.Tensor:
    """The ten tokens that carry all of a problem's numbers."""
    return torch.tensor([ids[0] for ids in encode(tokenizer, list("0123456789"))])


class AnswerBatches(Dataset):
    """Right answers in mixed styles, labels on the whole answer: item `i` is a whole batch."""

    def __init__(
        self,
        tokenizer: Any,
        num_batches: int,
        batch_size: int,
        seed: str,
        num_steps: tuple[int, int],
        texts: Texts,
        in_json: float = 0.0,
        before: int = 1,
    ) -> None:
        """`num_steps`: least and most of a chain; `texts` is the mixture, `in_json` the share of
        texts in JSON, which the user wished; see `write_document`."""
        self.tokenizer, self.num_batches, self.batch_size = tokenizer, num_batches, batch_size
        self.seed, self.num_steps, self.texts, self.before = seed, num_steps, texts, before
        self.in_json = in_json

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rng = random.Random(f"{self.seed}/{index}")
        num_steps = rng.randint(*self.num_steps), rng.randint(*self.num_steps)
        return collate(self.tokenizer, [self.draw(rng, num_steps) for _ in range(self.batch_size)])

    def draw(self, rng: random.Random, num_steps: tuple[int, int]) -> Example:
        """One text."""
        weights = rng.choices(list(self.texts), list(self.texts.values()))[0]
        problem, lines = write_document(
            rng, num_steps, lambda _: rng.choices(STYLES, weights)[0], before=self.before
        )
        return example(self.tokenizer, problem, lines, STYLES, in_json=rng.random() < self.in_json)


class InstructionBatches(AnswerBatches):
    """Ordinary instruction tuning: the loss is on what the target is to write, and only there.

    A quarter are its own right answers, half go on from text that others wrote, mistakes among it,
    as from any prompt; those lines carry no loss. A quarter replay pretraining: mixed texts with
    the loss on all lines, lest the target forgets what it is to go on from.
    """

    ERROR_RATE = 0.25

    def draw(self, rng: random.Random, num_steps: tuple[int, int]) -> Example:
        """One text; labels on taught lines, never from a mistake on in its line."""
        draw, rate = rng.random(), self.ERROR_RATE
        num_others, weights, taught = 0, (0.4, 0.4, 0.2), STYLES
        if draw < 0.25:
            weights, rate = (1.0, 0.0, 0.0), 0.0
        elif draw >= 0.5:  # others first, the target after them
            taught = (SIGNS,)
            num_others = rng.randint(1, sum(num_steps))
            weights = rng.choice(((0.0, 1.0, 0.0), (0.0, 0.6, 0.4)))

        def draw_style(index: int) -> Style:
            return SIGNS if 0 < num_others <= index else rng.choices(STYLES, weights)[0]

        problem, lines = write_document(rng, num_steps, draw_style, rate)
        return example(self.tokenizer, problem, lines, taught, in_json=rng.random() < self.in_json)


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids of prompt, answer and end, and for each the label: itself, or IGNORE."""

    ids: list[int]
    labels: list[int]


def example(
    tokenizer: Any,
    problem: Problem,
    lines: Sequence[Line],
    taught: Sequence[Style],
    *,
    in_json: bool = False,
) -> Example:
    """Labels on the lines of `taught` styles, up to a line's first wrong token."""
    prompt = prompt_text(tokenizer, problem, WISH if in_json else "")
    lines = as_json(lines) if in_json else lines
    texts = encode(tokenizer, [prompt, *(line.text for line in lines)])
    ids, labels = list(texts[0]), [IGNORE] * len(texts[0])
    for line, tokens in zip(lines, texts[1:], strict=True):
        num_taught, length = 0, 0
        if line.style in taught:
            for piece in tokenizer.convert_ids_to_tokens(tokens):
                length += len(piece)  # task texts are ASCII: a character is a byte is a letter
                if length > line.num_right:
                    break
                num_taught += 1
        ids += tokens
        labels += tokens[:num_taught] + [IGNORE] * (len(tokens) - num_taught)
    end = tokenizer.eos_token_id
    return Example([*ids, end], [*labels, end if lines[-1].style in taught else IGNORE])


def collate(tokenizer: Any, examples: Sequence[Example]) -> dict[str, torch.Tensor]:
    """Padded at the right; `labels` shifted: each place has the next token's.

    Returns:
        input_ids, labels: int64 [batch, tokens].
    """
    width = max(len(e.ids) for e in examples)
    ids = torch.full((len(examples), width), tokenizer.pad_token_id)
    labels = torch.full((len(examples), width), IGNORE)
    for row, e in enumerate(examples):
        ids[row, : len(e.ids)] = torch.tensor(e.ids)
        labels[row, : len(e.ids) - 1] = torch.tensor(e.labels[1:])
    return {"input_ids": ids, "labels": labels}
