"""The question pair's problems: one chain of 6 to 12 steps, whose right answer has one wording."""

from __future__ import annotations

import json
import random
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from problems import Chain, draw_chain, is_held_out_text  # examples/demo_pair

LABELS = "abcdefghijkl"
MIN_STEPS, MAX_STEPS = 6, 12


@dataclass(frozen=True, slots=True)
class Problem:
    """A chain; all texts derive from it."""

    chain: Chain

    @property
    def text(self) -> str:
        """What the user writes."""
        steps = zip(LABELS, self.chain.steps, strict=False)
        lines = (f"{label}: {step.sign} {step.operand}" for label, step in steps)
        return "\n".join([f"Start with {self.chain.start}", *lines])

    @property
    def solution(self) -> str:
        """The one right answer, without an end token."""
        values = self.chain.values
        lines = [
            f"{label}: {left} {step.sign} {step.operand} = {result}"
            for label, left, step, result in zip(
                LABELS, values, self.chain.steps, values[1:], strict=False
            )
        ]
        return "\n".join([*lines, f"Answer: {values[-1]}"])

    def is_right(self, answer: str) -> bool:
        """Whether the last line says the result, whatever the lines above say."""
        return answer.rpartition("\n")[2] == f"Answer: {self.chain.values[-1]}"


def held_out_problems(count: int, seed: int = 0) -> list[Problem]:
    """`count` distinct problems that the pair was not trained on, the same for the same seed."""
    rng = random.Random(f"held-out/{seed}")
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = _draw_held_out(rng)
        found.setdefault(problem.text, problem)
    return list(found.values())


def _draw_held_out(rng: random.Random) -> Problem:
    num_steps = rng.randint(MIN_STEPS, MAX_STEPS)
    while not is_held_out_text((problem := Problem(draw_chain(rng, num_steps))).text):
        pass
    return problem


GRADER = """
import json, os, sys
for line in sys.stdin:
    row = json.loads(line)
    answer, right = row["answer"], row["reference"]
    agreed = len(os.path.commonprefix([answer, right]))
    is_right = answer == right or agreed == len(answer) and not row["finished"]
    score = int(answer.split("\\n")[-1] == right.split("\\n")[-1])
    print(json.dumps({"score": score, "right_chars": None if is_right else agreed}), flush=True)
"""


def write_task(folder: Path, count: int) -> tuple[str, ...]:
    """Writes held-out problems as a task file; returns a program's flags for it."""
    path = folder / "problems.jsonl"
    rows = ({"prompt": p.text, "reference": p.solution} for p in held_out_problems(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    grader = shlex.join([sys.executable, "-c", GRADER])
    return "--task-file", str(path), "--grader", grader, "--max-tokens", "200"
