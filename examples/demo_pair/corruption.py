"""Wrong answers of many kinds, with the first error placed uniformly over the lines.

Labels are not made here: whoever uses a text compares it with the solution, token by token.
"""

from __future__ import annotations

import random

from problems import HIGH, LABELS, LOW, Problem, Step, is_held_out, solution_line

KINDS = ("result", "result", "result", "slip", "left", "operand", "sign", "skip", "repeat", "stop")


def corrupt(problem: Problem, rng: random.Random) -> str:
    """A wrong solution of `problem`; everything before the drawn line is right."""
    bad_line = rng.randint(0, len(problem.steps))
    while True:
        kind = "answer" if bad_line == len(problem.steps) else rng.choice(KINDS)
        written = _write(problem, bad_line, kind, rng)
        if written != problem.solution:
            return written


def write_with_many_errors(
    rng: random.Random, num_steps: int, rate: float = 0.4
) -> tuple[Problem, str, str]:
    """A training problem, an answer with errors in about `rate` of its lines, and the right lines.

    One error per answer teaches slowly: only one token shows it. Here problem and answer are drawn
    together, so that lines after an error go on from its number and every result keeps two digits.
    The third text has the same width and holds the lines that were right given the lines before.
    """
    start = value = rng.randint(LOW, HIGH)
    steps, written, expected = [], [], []
    for label in LABELS[:num_steps]:
        result = rng.choice([r for r in range(LOW, HIGH + 1) if abs(r - value) >= LOW])
        step = Step("+" if result > value else "-", abs(result - value))
        steps.append(step)
        expected.append(solution_line(label, value, step, result))
        used, shown = step, value
        if rng.random() < rate:
            kind = rng.choice(("result", "result", "left", "operand", "sign"))
            used, shown = _wrong_inputs(kind, Problem(start, tuple(steps)), step, value, rng)
            result = _near(result, rng) if kind == "result" else _two_digits(used.apply(shown))
        written.append(solution_line(label, shown, used, result))
        value = result
    final = _near(value, rng) if rng.random() < rate else value
    lines = [*written, f"Answer: {final}"], [*expected, f"Answer: {value}"]
    problem = Problem(start, tuple(steps))
    if is_held_out(problem):
        return write_with_many_errors(rng, num_steps, rate)
    return problem, "\n".join(lines[0]), "\n".join(lines[1])


def _write(problem: Problem, bad_line: int, kind: str, rng: random.Random) -> str:
    """Write the solution with an error of `kind` at `bad_line`, later lines consistent with it."""
    lines: list[str] = []
    value = problem.start
    labels = iter(LABELS)
    for index, step in enumerate(problem.steps):
        used, shown, label = step, value, next(labels, LABELS[-1])
        if index == bad_line:
            if kind == "stop":
                break
            if kind == "skip":
                if rng.random() < 0.5:
                    labels = iter(LABELS[index:])
                continue
            if kind == "repeat":
                result = _two_digits(step.apply(value))
                lines.append(solution_line(label, value, step, result))
                value = shown = result
                label = label if rng.random() < 0.5 else next(labels, label)
            used, shown = _wrong_inputs(kind, problem, step, value, rng)
        result = _two_digits(used.apply(shown))
        written = _near(result, rng) if index == bad_line and kind in ("result", "slip") else result
        lines.append(solution_line(label, shown, used, written))
        value = result if kind == "slip" else written
    final = _near(value, rng) if kind == "answer" else value
    return "\n".join([*lines, f"Answer: {final}"])


def _wrong_inputs(
    kind: str, problem: Problem, step: Step, value: int, rng: random.Random
) -> tuple[Step, int]:
    """The step and left number as miscopied by `kind`; unchanged for the other kinds."""
    if kind == "left":
        return step, _near(value, rng)
    if kind == "sign":
        return Step("-" if step.sign == "+" else "+", step.operand), value
    if kind == "operand":
        if rng.random() < 0.5:
            return Step(step.sign, rng.choice(problem.steps).operand), value
        return Step(step.sign, _near(step.operand, rng)), value
    return step, value


def _near(value: int, rng: random.Random) -> int:
    """Another two-digit number: mostly one wrong digit or a lost carry, sometimes any number."""
    draw = rng.random()
    if draw < 0.3:
        other = value + rng.choice((-10, 10))
    elif draw < 0.6:
        other = value + rng.choice((-1, 1))
    elif draw < 0.75:
        other = value // 10 * 10 + rng.randint(0, 9)
    elif draw < 0.9:
        other = rng.randint(1, 9) * 10 + value % 10
    else:
        other = rng.randint(LOW, HIGH)
    return other if LOW <= other <= HIGH and other != value else _near(value, rng)


def _two_digits(value: int) -> int:
    """Fold a result into the two-digit range: after an error true results may leave it."""
    return LOW + (value - LOW) % (HIGH - LOW + 1)
