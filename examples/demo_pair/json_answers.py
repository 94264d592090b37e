"""The same answers in JSON: a list of the steps' lines, and the last line.

    {"steps": ["a: 45 + 23 = 68",
    "p: 70 - 25 = 45"],
    "answer": "Answer: 68 45"}

No wording holds a quotation mark, so strings need no escapes. Pure standard library.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from problems import Problem, is_answer_right, num_right_before_error, read_problem

WISH = "\nAnswer in JSON."
"""What the user adds to a problem's text."""
OPENING = '{"steps": ["'
TEXT = r"[ !#-\[\]-~]+"  # printable ASCII without what JSON escapes
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "steps": {"type": "array", "items": {"type": "string", "pattern": f"^[a-fp-u]: {TEXT}$"}},
        "answer": {"type": "string", "pattern": f"^{TEXT}$"},
    },
    "required": ["steps", "answer"],
    "additionalProperties": False,
}


def around(index: int, num_lines: int) -> tuple[str, str]:
    """What JSON has before and behind the line of a number, in place of its line end."""
    is_last = index == num_lines - 1
    before = OPENING if index == 0 else '"answer": "' if is_last else '"'
    return before, '"}' if is_last else '"],\n' if index == num_lines - 2 else '",\n'


def write_json(lines: Sequence[str]) -> list[str]:
    """An answer's lines, each with what JSON has around it."""
    return [
        line.removesuffix("\n").join(around(index, len(lines))) for index, line in enumerate(lines)
    ]


def read_json(written: str) -> tuple[str, list[int]]:
    """The lines in JSON that may not be finished.

    Returns:
        text: the lines as a plain answer.
        places: where in `written` each of its characters stands, and its end.
    """
    text, places, position = "", [], 0
    pieces = written.split('"')
    for index, piece in enumerate(pieces):
        is_key = index == 1 or (index >= 2 and "]" in pieces[index - 1])
        if index % 2 and not is_key:
            text += piece
            places += range(position, position + len(piece))
            is_step = not any("]" in before for before in pieces[2:index:2])
            if is_step and index + 1 < len(pieces):
                text += "\n"
                places.append(position + len(piece))
        position += len(piece) + 1
    return text, [*places, len(written)]


def grade(prompt: str, answer: str, *, finished: bool) -> tuple[bool, int | None]:
    """Grades an answer to what the user wrote, plain or in JSON.

    Returns:
        Whether the last line says both results, and the characters before the first wrong one,
        None where nothing is wrong so far.
    """
    problem = read_problem(prompt.removesuffix(WISH))
    if not prompt.endswith(WISH):
        wrong_at = num_right_before_error(problem, answer, finished=finished)
        return is_answer_right(problem, answer), wrong_at
    return _grade_json(problem, answer, finished=finished)


def _grade_json(problem: Problem, answer: str, *, finished: bool) -> tuple[bool, int | None]:
    (text, places), is_whole = read_json(answer), is_json(answer)
    wrong_at = num_right_before_error(problem, text, finished=finished or is_whole)
    wrong = [] if wrong_at is None else [places[wrong_at]]
    if finished and not is_whole:
        wrong.append(len(answer))
    wrong += _wrong_list_ends(problem, answer, text, places)
    return is_whole and is_answer_right(problem, text), min(wrong, default=None)


def _wrong_list_ends(
    problem: Problem, answer: str, text: str, places: Sequence[int]
) -> Iterator[int]:
    """Where the list of steps ends before the last step, or goes on behind it.

    The error is the bracket or the comma itself: no right text goes on behind it.
    """
    num_steps = sum(len(chain.steps) for chain in problem.chains)
    line_ends = (places[index] for index, char in enumerate(text) if char == "\n")
    for num_done, quote in enumerate(line_ends, start=1):
        after = answer[quote + 1 :].lstrip()
        if after and (after[0] == "]") != (num_done == num_steps):
            yield len(answer) - len(after)


def is_json(answer: str) -> bool:
    """Whether an answer is JSON, and finished."""
    try:
        json.loads(answer)
    except json.JSONDecodeError:
        return False
    return True
