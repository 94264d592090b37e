"""The demo pair, and its held-out problems rendered with its chat template."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import problems  # examples/demo_pair is on pytest's pythonpath
import torch

from support.models import load_model, load_tokenizer

DEMO = Path(problems.__file__).resolve().parent


@dataclass(frozen=True)
class RenderedProblem:
    """A problem as the text a server is given, and its checker."""

    problem: problems.Problem
    prompt: str

    def is_right(self, answer: str) -> bool:
        return problems.is_answer_right(self.problem, answer.replace("<|im_end|>", ""))


def held_out(count: int) -> list[RenderedProblem]:
    """Always the same ones; the draft is wrong about two of the first eight."""
    tokenizer = load_tokenizer(DEMO / "target")
    return [
        RenderedProblem(
            problem,
            tokenizer.apply_chat_template(
                [{"role": "user", "content": problem.text}],
                tokenize=False,
                add_generation_prompt=True,
            ),
        )
        for problem in problems.held_out_problems(count, seed=8)
    ]


def disturbed_draft(folder: Path, noise: float = 0.35) -> Path:
    """The demo draft with noise on its matrices, in their standard deviations: often wrong."""
    model = load_model(DEMO / "draft")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name and "lm_head" not in name:
                weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(folder)
    load_tokenizer(DEMO / "draft").save_pretrained(folder)
    return folder
