"""The demo pair, and its held-out problems rendered with its chat template."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import problems  # examples/demo_pair is on pytest's pythonpath

from support.models import load_tokenizer

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
