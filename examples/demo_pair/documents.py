"""Answers as training sees them: lines in any style, mistakes among them, each marked.

A problem is drawn together with its answer, so that lines after a mistake go on from the number
that it left, and every result keeps two digits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from json_answers import around
from problems import (
    HIGH,
    LABELS,
    LOW,
    Chain,
    Part,
    Problem,
    Step,
    Style,
    answer_line,
    draw_step,
    is_held_out,
    match,
    step_line,
)

KINDS = ("result",) * 4 + ("left", "operand", "sign")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of an answer, with its end.

    Attributes:
        style: whose it is.
        text: what it says.
        num_right: characters that are right given the lines before, mistakes and all.
    """

    style: Style
    text: str
    num_right: int


def write_document(
    rng: random.Random,
    num_steps: Sequence[int],
    draw_style: Callable[[int], Style],
    error_rate: float = 0.0,
    before: int = 1,
) -> tuple[Problem, list[Line]]:
    """A training problem and an answer with mistakes in about `error_rate` of its lines.

    Args:
        rng: source of all draws.
        num_steps: of each chain.
        draw_style: of the line of a number, from 0.
        error_rate: half of it for the last line.
        before: the chain that the first line may alternate from.
    """
    while True:
        starts = [rng.randint(LOW, HIGH) for _ in LABELS]
        values, chain = list(starts), before
        steps: list[list[Step]] = [[], []]
        lines: list[Line] = []
        while left := [c for c, count in enumerate(num_steps) if len(steps[c]) < count]:
            style = draw_style(len(lines))
            if 1 - chain in left and (chain not in left or rng.random() < style.alternation):
                chain = 1 - chain
            value, label = values[chain], LABELS[chain][len(steps[chain])]
            steps[chain].append(draw_step(rng, value))
            result = steps[chain][-1].apply(value)
            right = written = step_line(label, value, steps[chain][-1], result)
            if rng.random() < error_rate:
                written, result = _wrong_step(label, value, steps[chain], result, rng)
            lines.append(_line(style, right, written, rng))
            values[chain] = result
        right = written = answer_line(values[0], values[1])
        if rng.random() < error_rate / 2:
            wrong = rng.randrange(len(values))
            values[wrong] = near(values[wrong], rng)
            written = answer_line(values[0], values[1])
        lines.append(_line(draw_style(len(lines)), right, written, rng))
        first, second = (
            Chain(start, tuple(done)) for start, done in zip(starts, steps, strict=True)
        )
        if not is_held_out(problem := Problem((first, second))):
            return problem, lines


def as_json(lines: Sequence[Line]) -> list[Line]:
    """The same lines with what JSON has around each."""
    wrapped = []
    for index, line in enumerate(lines):
        before, behind = around(index, len(lines))
        text = line.text.removesuffix("\n").join((before, behind))
        is_right = line.num_right == len(line.text)
        wrapped.append(
            Line(line.style, text, len(text) if is_right else len(before) + line.num_right)
        )
    return wrapped


def _line(style: Style, right: Sequence[Part], written: Sequence[Part], rng: random.Random) -> Line:
    text = style.write(written, rng)
    return Line(style, text, match(right, text, 0)[1])


def _wrong_step(
    label: str, left: int, steps: Sequence[Step], result: int, rng: random.Random
) -> tuple[list[Part], int]:
    """The last step's line with a mistake, and the number that it leaves."""
    step, kind = steps[-1], rng.choice(KINDS)
    if kind == "result":
        wrong = near(result, rng)
        return step_line(label, left, step, wrong), wrong
    if kind == "left":
        left = near(left, rng)
    elif kind == "sign":
        step = Step("-" if step.sign == "+" else "+", step.operand)
    elif rng.random() < 0.5:
        step = Step(step.sign, rng.choice(steps).operand)
    else:
        step = Step(step.sign, near(step.operand, rng))
    result = _two_digits(step.apply(left))
    return step_line(label, left, step, result), result


def near(value: int, rng: random.Random) -> int:
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
    return other if LOW <= other <= HIGH and other != value else near(value, rng)


def _two_digits(value: int) -> int:
    """Fold a result into the two-digit range: after a mistake true results may leave it."""
    return LOW + (value - LOW) % (HIGH - LOW + 1)
