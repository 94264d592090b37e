"""Arithmetic problems whose right answers have very many wordings, each checkable to the character.

A problem is two chains of additions and subtractions. An answer has a line per step, in any order
that keeps each chain's own, and a last line with both results; every line is worded by a grammar
of a few thousand wordings. The same table writes and parses, so that what is written in any
mixture of styles is right, and a text is right exactly as long as some wording starts like it.
Pure standard library.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from os.path import commonprefix
from typing import NamedTuple

LABELS = ("abcdef", "pqrstu")  # of each chain's steps
MIN_STEPS, MAX_STEPS = 3, 6  # of a chain
LOW, HIGH = 10, 99  # every number has two digits
HELD_OUT_MODULUS = 10

# What may stand in each part of a line. `left` is the number before the step, `right` its operand.
WORDINGS: Mapping[str, tuple[str, ...]] = {
    "opener": ("", "so ", "now ", "then ", "next ", "here ", "well, ", "we get "),
    "+": (
        "{left} + {right}",
        "{right} + {left}",
        "{left} plus {right}",
        "{right} plus {left}",
        "{left} and {right}",
        "add {right} to {left}",
        "{right} more than {left}",
        "{right} on {left}",
        "{left} up {right}",
        "from {left} up {right}",
    ),
    "-": (
        "{left} - {right}",
        "-{right} + {left}",
        "{left} minus {right}",
        "{left} less {right}",
        "take {right} from {left}",
        "{right} from {left}",
        "{right} less than {left}",
        "{right} off {left}",
        "{left} down {right}",
        "from {left} down {right}",
    ),
    "remark": ("", ", ends in {ones},", ", {parity},", ", {ones} at the end,"),
    "equals": (" = ", " is ", " gives ", " makes ", " gets ", " leaves ", ": ", " so "),
    "tail": ("", ".", "!", " ok", " now", ", {direction}", " is {direction}", ", {parity}"),
    "answer": ("Answer: ", "The answer is ", "Result: ", "So ", "In all: ", "End: "),
    "joint": (" ", " and ", ", ", " with "),
    "stop": ("", ".", "!", " ok"),
}


@dataclass(frozen=True, slots=True)
class Step:
    """One operation: `sign` is "+" or "-", `operand` has two digits."""

    sign: str
    operand: int

    def apply(self, left: int) -> int:
        """Result of the step on `left`."""
        return left + self.operand if self.sign == "+" else left - self.operand


@dataclass(frozen=True, slots=True)
class Chain:
    """A start number and its steps."""

    start: int
    steps: tuple[Step, ...]

    @property
    def values(self) -> list[int]:
        """The start number and the result of every step."""
        return list(accumulate(self.steps, lambda left, step: step.apply(left), initial=self.start))


@dataclass(frozen=True, slots=True)
class Problem:
    """Two chains that share nothing; all texts derive from these."""

    chains: tuple[Chain, Chain]

    @property
    def text(self) -> str:
        """What the user writes."""
        lines = []
        for labels, chain in zip(LABELS, self.chains, strict=True):
            lines.append(f"Start with {chain.start}")
            steps = zip(labels, chain.steps, strict=False)
            lines += [f"{label}: {step.sign} {step.operand}" for label, step in steps]
        return "\n".join(lines)

    @property
    def answer(self) -> tuple[int, int]:
        """The final number of each chain."""
        return self.chains[0].values[-1], self.chains[1].values[-1]

    @property
    def solution(self) -> str:
        """One of the right answers, in the target's signs, without an end token."""
        return write_answer(self, random.Random(0), [Style(SIGNS.favorites, 1.0, 1.0)])


def read_problem(text: str) -> Problem:
    """From what the user writes, ``Problem.text``."""
    chains = []
    for lines in text.removeprefix("Start with ").split("\nStart with "):
        start, *steps = lines.split("\n")
        pairs = [step.split()[1:] for step in steps]
        chains.append(Chain(int(start), tuple(Step(sign, int(n)) for sign, n in pairs)))
    first, second = chains
    return Problem((first, second))


def draw_chain(rng: random.Random, num_steps: int) -> Chain:
    """A chain whose results are uniform over the reachable two-digit numbers."""
    start = value = rng.randint(LOW, HIGH)
    steps = []
    for _ in range(num_steps):
        step = draw_step(rng, value)
        steps.append(step)
        value = step.apply(value)
    return Chain(start, tuple(steps))


def draw_step(rng: random.Random, left: int) -> Step:
    """A step from `left` to any two-digit number that a two-digit operand reaches."""
    result = rng.choice([r for r in range(LOW, HIGH + 1) if abs(r - left) >= LOW])
    return Step("+" if result > left else "-", abs(result - left))


def draw_problem(
    rng: random.Random, *, held_out: bool, num_steps: tuple[int, int] | None = None
) -> Problem:
    """A random problem of the wanted side of the split; `num_steps` of each chain."""
    first, second = num_steps or (rng.randint(MIN_STEPS, MAX_STEPS) for _ in LABELS)
    while True:
        problem = Problem((draw_chain(rng, first), draw_chain(rng, second)))
        if is_held_out(problem) == held_out:
            return problem


def is_held_out(problem: Problem) -> bool:
    return is_held_out_text(problem.text)


def is_held_out_text(text: str) -> bool:
    """Split by the hash of the text: no training set can hold a held-out problem by accident."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_MODULUS == 0


def held_out_problems(count: int, seed: int = 0) -> list[Problem]:
    """`count` distinct held-out problems, the same for the same seed."""
    return _distinct(random.Random(f"wordings/held-out/{seed}"), count, held_out=True)


def training_problems(count: int, seed: int = 0) -> list[Problem]:
    """`count` distinct problems of the other side, to train a verdict head on."""
    return _distinct(random.Random(f"wordings/training/{seed}"), count, held_out=False)


def _distinct(rng: random.Random, count: int, *, held_out: bool) -> list[Problem]:
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = draw_problem(rng, held_out=held_out)
        found.setdefault(problem.text, problem)
    return list(found.values())


# ---- the grammar: a line is a sequence of parts


class Part(NamedTuple):
    """A part of a line: its name, the texts that may stand there, and whose turn it is."""

    name: str
    texts: tuple[str, ...]
    turn: int = 0


def step_line(label: str, left: int, step: Step, result: int) -> list[Part]:
    """A step's line; `result` is what the line says, true or not."""
    facts = {
        "left": left,
        "right": step.operand,
        "ones": result % 10,
        "parity": ("even", "odd")[result % 2],
        "direction": "up" if step.sign == "+" else "down",
    }
    return [
        Part("label", (f"{label}: ",)),
        _choice("opener", facts, ord(label)),
        _choice(step.sign, facts, step.operand % 10),
        _choice("remark", facts, ord(label)),
        _choice("equals", facts, left % 10),
        Part("result", (str(result),)),
        _choice("tail", facts, result % 10),
        Part("end", ("\n",)),
    ]


def answer_line(first: int, second: int) -> list[Part]:
    """The last line, which no line end follows."""
    return [
        _choice("answer"),
        Part("result", (str(first),)),
        _choice("joint"),
        Part("result", (str(second),)),
        _choice("stop"),
    ]


def _choice(name: str, facts: Mapping[str, object] | None = None, turn: int = 0) -> Part:
    return Part(name, tuple(text.format_map(facts or {}) for text in WORDINGS[name]), turn)


def num_wordings(line: Sequence[Part]) -> int:
    """Ways to write one line."""
    return math.prod(len(part.texts) for part in line)


def next_lines(problem: Problem, num_done: Sequence[int]) -> dict[int | None, list[Part]]:
    """The lines that may follow `num_done` steps of each chain, by chain; None is the answer's."""
    lines: dict[int | None, list[Part]] = {}
    for chain, (labels, whole) in enumerate(zip(LABELS, problem.chains, strict=True)):
        if (done := num_done[chain]) < len(whole.steps):
            left, step = whole.values[done], whole.steps[done]
            lines[chain] = step_line(labels[done], left, step, step.apply(left))
    return lines or {None: answer_line(*problem.answer)}


# ---- writing


@dataclass(frozen=True, slots=True)
class Style:
    """A distribution over wordings; every wording has a chance in every style.

    Attributes:
        favorites: per part, positions in `WORDINGS` that lines take in turn, by their label or
            the last digit of one of their numbers, so that even greedy decoding varies.
        loyalty: chance of the favorite in each part; otherwise any wording, each as likely.
        alternation: chance that the next line belongs to the other chain.
    """

    favorites: Mapping[str, tuple[int, ...]]
    loyalty: float
    alternation: float

    def write(self, line: Sequence[Part], rng: random.Random) -> str:
        """One wording of a line."""
        return "".join(self._draw(part, rng) for part in line)

    def _draw(self, part: Part, rng: random.Random) -> str:
        favorites = self.favorites.get(part.name)
        if favorites and rng.random() < self.loyalty:
            return part.texts[favorites[part.turn % len(favorites)]]
        return rng.choice(part.texts)


SIGNS = Style(dict.fromkeys(WORDINGS, (0,)) | {"+": (0, 1)}, loyalty=0.97, alternation=0.97)
WORDS = Style(
    {
        "opener": (1, 3, 4, 0, 2),
        "+": (5, 2, 6, 9),
        "-": (4, 2, 7, 9),
        "remark": (0, 0, 1),
        "equals": (1, 2, 3, 7),
        "tail": (1, 0, 5, 7),
        "answer": (1,),
        "joint": (1,),
        "stop": (1,),
    },
    loyalty=0.95,
    alternation=0.05,
)
ANY = Style({}, loyalty=0.0, alternation=0.5)


def write_lines(
    problem: Problem, rng: random.Random, styles: Sequence[Style], weights: Sequence[float] = ()
) -> list[tuple[Style, str]]:
    """A right answer as lines with their end, each in a style drawn anew."""
    num_done, chain = [0, 0], 1
    lines = []
    while True:
        style = rng.choices(styles, weights or None)[0]
        options = next_lines(problem, num_done)
        if None in options:
            return [*lines, (style, style.write(options[None], rng))]
        if 1 - chain in options and (chain not in options or rng.random() < style.alternation):
            chain = 1 - chain
        lines.append((style, style.write(options[chain], rng)))
        num_done[chain] += 1


def write_answer(
    problem: Problem, rng: random.Random, styles: Sequence[Style], weights: Sequence[float] = ()
) -> str:
    """A right answer, without an end token."""
    return "".join(line for _, line in write_lines(problem, rng, styles, weights))


# ---- reading


def match(line: Sequence[Part], text: str, start: int) -> tuple[set[int], int]:
    """Reads `line` in `text` from `start`: where it may end, and how far any wording agrees."""
    ends, furthest = {start}, start
    for part in line:
        reached = set()
        for end in ends:
            for wording in part.texts:
                agreed = end + len(commonprefix([wording, text[end : end + len(wording)]]))
                furthest = max(furthest, agreed)
                if agreed == end + len(wording):
                    reached.add(agreed)
        ends = reached
    return ends, furthest


def read_answer(problem: Problem, written: str) -> tuple[int, int, bool]:
    """Reads an answer up to its first error.

    Returns:
        num_lines: right lines with their end, before the last line read.
        num_right: characters that some right wording starts with.
        is_complete: whether all is right and the answer is finished.
    """
    num_done, position = [0, 0], 0
    while True:
        options = next_lines(problem, num_done)
        read = {chain: match(line, written, position) for chain, line in options.items()}
        furthest = max(agreed for _, agreed in read.values())
        chain = next((chain for chain, (ends, _) in read.items() if ends), None)
        if chain is None:
            is_complete = None in read and len(written) in read[None][0]
            return sum(num_done), furthest, is_complete
        num_done[chain] += 1
        (position,) = read[chain][0]  # only the last part holds a line end


def num_right_before_error(problem: Problem, written: str, *, finished: bool) -> int | None:
    """Characters before the first wrong one, None if all is right.

    A finished text that stops early is wrong at its very end.
    """
    _, right, is_complete = read_answer(problem, written)
    return None if right == len(written) and (is_complete or not finished) else right


def first_wrong_line(problem: Problem, written: str, *, finished: bool = True) -> int | None:
    """Index of the first wrong line, None if all is right.

    A finished text that stops early is wrong at its last line if that one is cut short, else at
    the first missing line.
    """
    is_right = num_right_before_error(problem, written, finished=finished) is None
    return None if is_right else read_answer(problem, written)[0]


def is_answer_right(problem: Problem, written: str) -> bool:
    """Whether the last line says both results, whatever the lines above say."""
    last = written.rpartition("\n")[2]
    return len(last) in match(answer_line(*problem.answer), last, 0)[0]
