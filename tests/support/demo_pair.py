"""The demo pair, and its held-out problems rendered with its chat template."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import problems  # examples/demo_pair is on pytest's pythonpath
from transformers import AutoTokenizer

DEMO = Path(problems.__file__).resolve().parent


@dataclass(frozen=True)
class RenderedProblem:
    """A problem as the text a server is given, and its checker."""

    problem: problems.Problem
    prompt: str

    def is_right(self, answer: str) -> bool:
        return problems.is_answer_right(self.problem, answer.replace("<|im_end|>", ""))


def load_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO / "target")


def held_out(count: int) -> list[RenderedProblem]:
    tokenizer = load_tokenizer()
    return [
        RenderedProblem(
            problem,
            tokenizer.apply_chat_template(
                [{"role": "user", "content": problem.text}],
                tokenize=False,
                add_generation_prompt=True,
            ),
        )
        for problem in problems.held_out_problems(count, seed=1)
    ]
