"""Held-out problems of the demo pair, rendered with its chat template."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from random_pair import DEMO
from transformers import AutoTokenizer


@dataclass(frozen=True)
class RenderedProblem:
    """A problem as the text a server is given, and its checker."""

    problem: Any
    prompt: str

    def is_right(self, answer: str) -> bool:
        return _problems().is_answer_right(self.problem, answer.replace("<|im_end|>", ""))


def _problems() -> Any:
    if str(DEMO) not in sys.path:
        sys.path.append(str(DEMO))
    import problems

    return problems


def held_out(count: int) -> list[RenderedProblem]:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    return [
        RenderedProblem(
            problem,
            tokenizer.apply_chat_template(
                [{"role": "user", "content": problem.text}],
                tokenize=False,
                add_generation_prompt=True,
            ),
        )
        for problem in _problems().held_out_problems(count, seed=1)
    ]
