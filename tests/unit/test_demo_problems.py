"""Problems with many right wordings: what is written grades right, what is changed grades wrong."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from itertools import product
from os.path import commonprefix

import pytest
from documents import write_document
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import (
    ANY,
    HIGH,
    LABELS,
    LOW,
    SIGNS,
    WORDINGS,
    WORDS,
    Chain,
    Part,
    Problem,
    Step,
    Style,
    answer_line,
    draw_chain,
    draw_problem,
    first_wrong_line,
    held_out_problems,
    is_answer_right,
    is_held_out,
    next_lines,
    num_right_before_error,
    num_wordings,
    read_problem,
    step_line,
    training_problems,
    write_answer,
    write_lines,
)
from task_file import answer_format

GOLDEN = Problem(
    (Chain(27, (Step("+", 10), Step("-", 18))), Chain(45, (Step("-", 20), Step("+", 33))))
)
GOLDEN_ANSWERS = (
    "a: 27 + 10 = 37\np: 45 - 20 = 25\nb: 37 - 18 = 19\nq: 33 + 25 = 58\nAnswer: 19 58",
    "p: now take 20 from 45, odd, leaves 25.\nq: 33 more than 25 is 58, up\n"
    "a: so add 10 to 27, ends in 7, makes 37!\nb: 18 less than 37 so 19, odd\nSo 19 and 58.",
)
STYLES = {"signs": [SIGNS], "words": [WORDS], "any": [ANY], "mixture": [SIGNS, WORDS, ANY]}
# A token of an answer: a digit, a word, a label, anything else.
TOKENS = re.compile(r"[a-z]: |[0-9]|\n|[A-Za-z]+|[^0-9A-Za-z\n]+")

seeds = st.integers(0, 10**9)
mixtures = st.sampled_from(sorted(STYLES))


def _written(seed: int, mixture: str) -> tuple[Problem, str]:
    rng = random.Random(seed)
    problem = draw_problem(rng, held_out=False)
    return problem, write_answer(problem, rng, STYLES[mixture])


def _all_texts(line: list[Part]) -> list[str]:
    """Every wording of a line, the long way."""
    return ["".join(texts) for texts in product(*(part.texts for part in line))]


def _longest_right_start(lines: list[list[Part]], text: str) -> int:
    """What the grader computes, by comparing with every wording."""
    return max(len(commonprefix([text, right])) for line in lines for right in _all_texts(line))


def test_golden_problem() -> None:
    assert GOLDEN.text == "Start with 27\na: + 10\nb: - 18\nStart with 45\np: - 20\nq: + 33"
    assert read_problem(GOLDEN.text) == GOLDEN
    assert GOLDEN.answer == (19, 58)
    assert GOLDEN.solution == GOLDEN_ANSWERS[0]


@pytest.mark.parametrize("written", GOLDEN_ANSWERS)
def test_golden_answers_are_right(written: str) -> None:
    assert num_right_before_error(GOLDEN, written, finished=True) is None
    assert is_answer_right(GOLDEN, written)


@pytest.mark.parametrize(
    ("written", "finished", "right", "line"),
    [
        (GOLDEN_ANSWERS[0][:20], False, None, None),
        (GOLDEN_ANSWERS[0][:20], True, 20, 1),
        (GOLDEN_ANSWERS[0][:-11], True, len(GOLDEN_ANSWERS[0]) - 11, 4),
        (GOLDEN_ANSWERS[0] + "\n", True, len(GOLDEN_ANSWERS[0]), 4),
        ("a: 27 + 10 = 38", False, 14, 0),
        ("a: 28 + 10 = 38", False, 4, 0),
        ("a: 27 - 10", False, 6, 0),
        ("a: 20", False, 4, 0),
        ("b: ", False, 0, 0),
        ("a: 10 + 27 is 37\nb: 37 less 18, even,", False, 33, 1),
        ("a: 10 + 27 is 37\nAnswer: 37", False, 17, 1),
    ],
)
def test_where_a_text_goes_wrong(
    written: str, finished: bool, right: int | None, line: int | None
) -> None:
    assert num_right_before_error(GOLDEN, written, finished=finished) == right
    assert first_wrong_line(GOLDEN, written, finished=finished) == line


@settings(max_examples=100, deadline=None)
@given(seeds, mixtures)
def test_what_is_written_is_right_wherever_it_stops(seed: int, mixture: str) -> None:
    problem, written = _written(seed, mixture)
    assert num_right_before_error(problem, written, finished=True) is None
    assert first_wrong_line(problem, written) is None
    assert is_answer_right(problem, written)
    stop = random.Random(seed).randrange(len(written) - len(" ok"))  # what may end a right answer
    assert num_right_before_error(problem, written[:stop], finished=False) is None
    assert num_right_before_error(problem, written[:stop], finished=True) == stop


@settings(max_examples=60, deadline=None)
@given(seeds, mixtures)
def test_a_changed_token_is_wrong_at_its_place(seed: int, mixture: str) -> None:
    """Digits, labels and signs replaced: wrong where no wording goes on, counted the long way."""
    problem, written = _written(seed, mixture)
    rng = random.Random(seed)
    tokens = [m for m in TOKENS.finditer(written) if re.search(r"[0-9+]|[a-z]: | - ", m[0])]
    token = rng.choice(tokens)
    others = {"label": [f"{a}: " for a in "".join(LABELS)], "sign": [" + ", " - "]}
    kind = "label" if token[0][0].isalpha() else "digit" if token[0].isdigit() else "sign"
    other = rng.choice([t for t in others.get(kind, list("0123456789")) if t != token[0]])
    changed = written[: token.start()] + other + written[token.end() :]
    right = num_right_before_error(problem, changed, finished=True)

    above = written.rfind("\n", 0, token.start()) + 1
    num_done = [sum(written[:above].count(f"{a}: ") for a in labels) for labels in LABELS]
    lines = list(next_lines(problem, num_done).values())
    wording = changed[above:].split("\n")[0] + "\n" * ("\n" in changed[above:])
    expected = above + _longest_right_start(lines, wording)
    assert right == expected
    assert token.start() <= right < above + len(wording)


@settings(max_examples=100, deadline=None)
@given(seeds, mixtures)
def test_a_false_remark_is_wrong(seed: int, mixture: str) -> None:
    problem, written = _written(seed, mixture)
    for true, false in (("even", "odd"), ("odd", "even"), ("up\n", "down\n"), ("down\n", "up\n")):
        if true in written:
            right = num_right_before_error(problem, written.replace(true, false), finished=True)
            assert 0 <= right - written.index(true) < len(false)


def test_every_line_has_thousands_of_wordings_and_no_two_are_one() -> None:
    for line in next_lines(GOLDEN, [0, 0]).values():
        assert num_wordings(line) == len(_all_texts(line)) > 10_000
    line = step_line("a", 27, Step("+", 10), 37)
    assert len(set(_all_texts(line))) == num_wordings(line)
    assert num_wordings(answer_line(19, 58)) == len(set(_all_texts(answer_line(19, 58)))) == 96


def test_lines_of_both_chains_may_come_in_any_order() -> None:
    rng = random.Random(0)
    orders = {
        "".join(line[0] for _, line in write_lines(GOLDEN, rng, [ANY])[:-1]) for _ in range(300)
    }
    assert orders == {"abpq", "apbq", "apqb", "pabq", "paqb", "pqab"}


@pytest.mark.parametrize("style", [SIGNS, WORDS])
def test_a_style_has_favorites_and_knows_every_wording(style: Style) -> None:
    rng = random.Random(1)
    assert style.favorites.keys() == WORDINGS.keys()
    line = step_line("a", 27, Step("+", 10), 37)
    drawn = [style.write(line, rng) for _ in range(4000)]
    assert max(drawn.count(text) for text in set(drawn)) > 3000
    for part in line:
        assert all(any(text in written for written in drawn) for text in part.texts)


def test_favorites_of_the_styles_differ() -> None:
    rng = random.Random(2)
    problem = draw_problem(rng, held_out=False)
    signs, words = (Style(s.favorites, 1.0, s.alternation) for s in (SIGNS, WORDS))
    lines = [{line for _, line in write_lines(problem, rng, [s])} for s in (signs, words)]
    assert not lines[0] & lines[1]
    assert len({re.sub(r"[0-9a-z]*[0-9]|^[a-z]: ", "", line) for line in lines[1]}) > 4


def test_a_right_last_line_below_wrong_ones_is_a_right_answer() -> None:
    written = GOLDEN_ANSWERS[0].replace("= 37", "= 38")
    assert num_right_before_error(GOLDEN, written, finished=True) == 14
    assert is_answer_right(GOLDEN, written)
    assert not is_answer_right(GOLDEN, written.replace("58", "59"))
    assert not is_answer_right(GOLDEN, written + "0")
    assert not is_answer_right(GOLDEN, "")


def test_held_out_problems_are_never_drawn_for_training() -> None:
    rng = random.Random(3)
    training = [draw_problem(rng, held_out=False) for _ in range(1000)]
    draw_signs: Callable[[int], Style] = lambda _: SIGNS  # noqa: E731
    training += training_problems(200)
    training += [write_document(rng, (3, 3), draw_signs, 0.5)[0] for _ in range(200)]
    held_out = held_out_problems(100)
    assert held_out == held_out_problems(100)
    assert len({p.text for p in held_out}) == 100
    assert all(is_held_out(p) for p in held_out)
    assert not any(is_held_out(p) for p in training)


def test_split_keeps_about_a_tenth() -> None:
    rng = random.Random(1)
    problems = [Problem((draw_chain(rng, 3), draw_chain(rng, 4))) for _ in range(4000)]
    assert 0.08 < sum(map(is_held_out, problems)) / len(problems) < 0.12
    values = {value for p in problems for chain in p.chains for value in chain.values}
    assert values == set(range(LOW, HIGH + 1))


@settings(max_examples=100, deadline=None)
@given(seeds, st.floats(0, 1))
def test_mistakes_are_marked_where_they_are(seed: int, rate: float) -> None:
    """The grader finds the first mistake of a document at the place that its line says."""
    rng = random.Random(seed)
    problem, lines = write_document(rng, (2, 3), lambda _: rng.choice([SIGNS, WORDS, ANY]), rate)
    text = "".join(line.text for line in lines)
    before = 0
    for line in lines:
        if line.num_right < len(line.text):
            assert num_right_before_error(problem, text, finished=True) == before + line.num_right
            return
        before += len(line.text)
    assert num_right_before_error(problem, text, finished=True) is None


def test_every_right_answer_has_the_format_of_constrained_requests():
    rng, pattern = random.Random(3), re.compile(answer_format())
    for problem in held_out_problems(60):
        answer = write_answer(problem, rng, [ANY, WORDS, SIGNS])
        assert pattern.fullmatch(answer)
        assert not pattern.fullmatch(answer[:-1] + "?")
        assert not pattern.fullmatch("\n".join(answer.split("\n")[1:]).replace(": ", ":"))
