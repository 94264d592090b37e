"""Answers in JSON: what is written is JSON of the schema, and graded like the plain answer."""

from __future__ import annotations

import json
import random

from documents import as_json, write_document
from hypothesis import given
from hypothesis import strategies as st
from json_answers import SCHEMA, WISH, grade, read_json, write_json
from jsonschema import validate
from problems import ANY, SIGNS, WORDS, Problem, draw_problem, write_lines

STYLES = [SIGNS, WORDS, ANY]
seeds = st.integers(0, 10**9)


def right_lines(seed: int) -> tuple[Problem, list[str]]:
    rng = random.Random(seed)
    problem = draw_problem(rng, held_out=False)
    return problem, [line for _, line in write_lines(problem, rng, STYLES)]


@given(seeds)
def test_right_answers(seed: int) -> None:
    problem, lines = right_lines(seed)
    written = "".join(write_json(lines))
    validate(json.loads(written), SCHEMA)
    assert read_json(written)[0] == "".join(lines)
    assert grade(problem.text + WISH, written, finished=True) == (True, None)
    assert grade(problem.text, "".join(lines), finished=True) == (True, None)


@given(seeds, st.floats(0, 1))
def test_a_right_beginning_is_right(seed: int, share: float) -> None:
    problem, lines = right_lines(seed)
    whole = "".join(write_json(lines))
    begun = whole[: int(share * (len(whole) - 1))]
    assert grade(problem.text + WISH, begun, finished=False) == (False, None)
    is_right, wrong_at = grade(problem.text + WISH, begun, finished=True)
    assert not is_right
    assert wrong_at is not None
    assert wrong_at <= len(begun)


@given(seeds, st.floats(0, 1))
def test_mistakes_are_found_where_documents_mark_them(seed: int, rate: float) -> None:
    rng = random.Random(seed)
    problem, plain = write_document(rng, (2, 3), lambda _: rng.choice(STYLES), rate)
    lines, before = as_json(plain), 0
    written = "".join(line.text for line in lines)
    wrong_at = None
    for line in lines:
        if line.num_right < len(line.text):
            wrong_at = before + line.num_right
            break
        before += len(line.text)
    assert grade(problem.text + WISH, written, finished=True)[1] == wrong_at


def test_a_list_that_ends_early_is_wrong_at_its_bracket():
    problem, lines = right_lines(1)
    short = "".join(write_json([*lines[:3], lines[-1]]))
    is_right, wrong_at = grade(problem.text + WISH, short, finished=True)
    assert is_right  # its last line says both results
    assert wrong_at == short.index("]")


@given(seeds, st.sampled_from([",", ", ", ",\n"]))
def test_a_list_that_goes_on_is_wrong_at_its_comma(seed: int, separator: str) -> None:
    problem, lines = right_lines(seed)
    right = "".join(write_json(lines))
    bracket = right.index("]")
    for rest in ("", '"', '"a: 12 + 34 = 46"],\n"answer": "'):
        written = right[:bracket] + separator + rest
        assert grade(problem.text + WISH, written, finished=False) == (False, bracket)
