"""The demo pair's problems: one right solution, a checkable one, and a split that cannot leak."""

from __future__ import annotations

import random
import re
from pathlib import Path

import problems
import pytest
from corruption import corrupt, write_with_many_errors
from problems import (
    HIGH,
    LOW,
    MAX_STEPS,
    Problem,
    Step,
    draw_problem,
    first_wrong_line,
    held_out_problems,
    is_answer_right,
    is_held_out,
    make_problem,
    read_answer,
)

DEMO = Path(problems.__file__).parent

GOLDEN = Problem(27, (Step("+", 10), Step("-", 18)))
GOLDEN_SOLUTION = "a: 27 + 10 = 37\nb: 37 - 18 = 19\nAnswer: 19"


def test_golden_problem() -> None:
    assert GOLDEN.text == "Start with 27\na: + 10\nb: - 18"
    assert GOLDEN.solution == GOLDEN_SOLUTION
    assert GOLDEN.answer == 19


@pytest.mark.parametrize("seed", range(20))
def test_solution_is_true_arithmetic(seed: int) -> None:
    problem = make_problem(random.Random(seed))
    *lines, answer = problem.solution.split("\n")
    value = problem.start
    for line, step in zip(lines, problem.steps, strict=True):
        left, sign, right, result = re.fullmatch(
            r"[a-l]: (\d\d) ([+-]) (\d\d) = (\d\d)", line
        ).groups()
        assert (int(left), sign, int(right)) == (value, step.sign, step.operand)
        value = int(left) + int(right) if sign == "+" else int(left) - int(right)
        assert value == int(result)
        assert LOW <= value <= HIGH
    assert answer == f"Answer: {value}"


def test_same_seed_same_problems() -> None:
    assert make_problem(random.Random(5)) == make_problem(random.Random(5))
    assert held_out_problems(20) == held_out_problems(20)


def test_held_out_problems_are_never_drawn_for_training() -> None:
    rng = random.Random(0)
    training = [draw_problem(rng, held_out=False) for _ in range(2000)]
    held_out = held_out_problems(200)
    assert not any(is_held_out(p) for p in training)
    assert all(is_held_out(p) for p in held_out)
    assert len({p.text for p in held_out}) == 200
    assert not {p.text for p in training} & {p.text for p in held_out}


def test_answers_with_many_errors_are_about_training_problems() -> None:
    rng = random.Random(2)
    for _ in range(300):
        problem, written, expected = write_with_many_errors(rng, 8)
        assert not is_held_out(problem)
        assert len(written) == len(expected)
        right = len(problem.solution.split("\n")[0])
        assert expected[:right] == problem.solution[:right]


def test_split_keeps_about_a_tenth() -> None:
    rng = random.Random(1)
    share = sum(is_held_out(make_problem(rng)) for _ in range(5000)) / 5000
    assert 0.08 < share < 0.12


def test_training_batches_hold_no_held_out_problem() -> None:
    """What training calls asks for the training side in every place."""
    for name in ("data.py", "train.py"):
        source = (DEMO / name).read_text()
        assert "held_out=True" not in source
        assert "make_problem" not in source
        assert "held_out_problems" not in source


@pytest.mark.parametrize(
    ("written", "finished", "line"),
    [
        (GOLDEN_SOLUTION, True, None),
        (GOLDEN_SOLUTION[:20], False, None),
        (GOLDEN_SOLUTION[:20], True, 1),
        ("a: 27 + 10 = 37", True, 1),
        (GOLDEN_SOLUTION.replace("= 37", "= 47"), True, 0),
        (GOLDEN_SOLUTION.replace("b: 37", "b: 47"), True, 1),
        (GOLDEN_SOLUTION.replace("Answer: 19", "Answer: 18"), True, 2),
        (GOLDEN_SOLUTION + "\n", True, 2),
    ],
)
def test_first_wrong_line(written: str, finished: bool, line: int | None) -> None:
    assert first_wrong_line(GOLDEN, written, finished=finished) == line


def test_answer_check() -> None:
    assert is_answer_right(GOLDEN, GOLDEN_SOLUTION)
    assert not is_answer_right(GOLDEN, GOLDEN_SOLUTION + "0")
    assert read_answer("no answer line") is None


def test_corrupted_solutions_are_wrong_and_errors_spread_over_the_lines() -> None:
    rng = random.Random(3)
    first_wrong = []
    for _ in range(600):
        problem = make_problem(rng, 6)
        written = corrupt(problem, rng)
        line = first_wrong_line(problem, written)
        assert line is not None
        first_wrong.append(line)
        corrupt(make_problem(rng, MAX_STEPS), rng)
    counts = [first_wrong.count(line) for line in range(7)]
    assert min(counts) > 40, counts
