"""The question pair, the demo of earlier versions: its target was taught to answer a question.

Most tests serve it. Problems are rendered with its chat template.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from support.models import load_model, load_tokenizer
from support.one_chain import Problem, held_out_problems

DEMO = Path(__file__).resolve().parents[1] / "data" / "question_pair"


@dataclass(frozen=True)
class RenderedProblem:
    """A problem as the text a server is given, and its checker."""

    problem: Problem
    prompt: str

    def is_right(self, answer: str) -> bool:
        return self.problem.is_right(answer.replace("<|im_end|>", ""))


def rendered(folder: Path, problems: Iterable[Any]) -> list[str]:
    """Problems as prompts, by the chat template of the model in ``folder``."""
    tokenizer = load_tokenizer(folder)
    chats = ([{"role": "user", "content": problem.text}] for problem in problems)
    options = {"tokenize": False, "add_generation_prompt": True}
    return [tokenizer.apply_chat_template(chat, **options) for chat in chats]


def held_out(count: int) -> list[RenderedProblem]:
    """Always the same ones; the draft is wrong about two of the first eight."""
    problems = held_out_problems(count, seed=8)
    return [*map(RenderedProblem, problems, rendered(DEMO / "target", problems))]


def disturbed_draft(folder: Path, noise: float = 0.35) -> Path:
    """The pair's draft with noise on its matrices, in their standard deviations: often wrong."""
    model = load_model(DEMO / "draft")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name and "lm_head" not in name:
                weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(folder)
    load_tokenizer(DEMO / "draft").save_pretrained(folder)
    return folder
