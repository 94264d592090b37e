"""Arithmetic problems whose written solution is unique, so every token of an answer can be checked.

A problem starts from a two-digit number and applies lettered additions and subtractions; every
result keeps two digits, so a solution has a fixed width per line. The solution is unique: a text is
right exactly as long as it is a prefix of it. Pure standard library.
"""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import dataclass

LABELS = "abcdefghijkl"
MIN_STEPS, MAX_STEPS = 6, 12
LOW, HIGH = 10, 99
HELD_OUT_MODULUS = 10

_ANSWER = re.compile(r"^Answer: (\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Step:
    """One operation: `sign` is "+" or "-", `operand` has two digits."""

    sign: str
    operand: int

    def apply(self, left: int) -> int:
        """Result of the step on `left`."""
        return left + self.operand if self.sign == "+" else left - self.operand


@dataclass(frozen=True, slots=True)
class Problem:
    """A start number and its steps; all texts derive from these."""

    start: int
    steps: tuple[Step, ...]

    @property
    def text(self) -> str:
        """What the user writes."""
        lines = [f"Start with {self.start}"]
        lines += [f"{a}: {s.sign} {s.operand}" for a, s in zip(LABELS, self.steps, strict=False)]
        return "\n".join(lines)

    @property
    def answer(self) -> int:
        """The final number."""
        value = self.start
        for step in self.steps:
            value = step.apply(value)
        return value

    @property
    def solution(self) -> str:
        """The one right answer text, without an end token."""
        lines, value = [], self.start
        for label, step in zip(LABELS, self.steps, strict=False):
            lines.append(solution_line(label, value, step, step.apply(value)))
            value = step.apply(value)
        return "\n".join([*lines, f"Answer: {value}"])


def read_problem(text: str) -> Problem:
    """From what the user writes, ``Problem.text``."""
    first, *lines = text.split("\n")
    steps = [line.split()[1:] for line in lines]
    start = int(first.removeprefix("Start with "))
    return Problem(start, tuple(Step(sign, int(operand)) for sign, operand in steps))


def solution_line(label: str, left: int, step: Step, result: int) -> str:
    """One line of an answer; corruption writes wrong ones with it too."""
    return f"{label}: {left} {step.sign} {step.operand} = {result}"


def make_problem(rng: random.Random, num_steps: int | None = None) -> Problem:
    """Draw a problem whose results are uniform over the reachable two-digit numbers."""
    if num_steps is None:
        num_steps = rng.randint(MIN_STEPS, MAX_STEPS)
    start = value = rng.randint(LOW, HIGH)
    steps = []
    for _ in range(num_steps):
        reachable = [r for r in range(LOW, HIGH + 1) if abs(r - value) >= LOW]
        result = rng.choice(reachable)
        steps.append(Step("+" if result > value else "-", abs(result - value)))
        value = result
    return Problem(start, tuple(steps))


def is_held_out(problem: Problem) -> bool:
    return is_held_out_text(problem.text)


def is_held_out_text(text: str) -> bool:
    """Split by the hash of the text: no training set can hold a held-out problem by accident."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_MODULUS == 0


def draw_problem(rng: random.Random, *, held_out: bool, num_steps: int | None = None) -> Problem:
    """A random problem of the wanted side of the split."""
    if num_steps is None:
        num_steps = rng.randint(MIN_STEPS, MAX_STEPS)
    while True:
        problem = make_problem(rng, num_steps)
        if is_held_out(problem) == held_out:
            return problem


def held_out_problems(count: int, seed: int = 0) -> list[Problem]:
    """`count` distinct held-out problems, the same for the same seed."""
    rng = random.Random(f"held-out/{seed}")
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = draw_problem(rng, held_out=True)
        found.setdefault(problem.text, problem)
    return list(found.values())


def num_right_chars(problem: Problem, written: str) -> int:
    """Length of the longest common prefix of `written` and the solution."""
    solution = problem.solution
    limit = min(len(written), len(solution))
    return next((i for i in range(limit) if written[i] != solution[i]), limit)


def num_right_before_error(problem: Problem, written: str, *, finished: bool) -> int | None:
    """Characters before the first wrong one, None if all is right.

    A finished text that stops early is wrong at its very end.
    """
    right = num_right_chars(problem, written)
    if right == len(written) and (not finished or right == len(problem.solution)):
        return None
    return right


def first_wrong_line(problem: Problem, written: str, *, finished: bool = True) -> int | None:
    """Index of the first wrong line, None if all is right.

    A finished text that stops early is wrong at its last line if that one is cut short, else at
    the first missing line; an unfinished one is right as long as it is a prefix of the solution.
    """
    solution, right = problem.solution, num_right_before_error(problem, written, finished=finished)
    if right is None:
        return None
    stops_at_line_end = right == len(written) and solution[right] == "\n"
    return solution[:right].count("\n") + stops_at_line_end


def read_answer(written: str) -> int | None:
    """The number of the last answer line, None if there is none."""
    found = _ANSWER.findall(written)
    return int(found[-1]) if found else None


def is_answer_right(problem: Problem, written: str) -> bool:
    """Whether the final answer is exactly right."""
    return read_answer(written) == problem.answer
