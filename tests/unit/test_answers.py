"""Earlier answers by the end of a prompt, or of an answer."""

import random
import tracemalloc

import pytest

from sglang_parse.core.answers import GRAM, MAX_TOKENS, AnswerIndex
from sglang_parse.core.config import ConfigError, ParseConfig

pytestmark = pytest.mark.unit

ONE, TWO = ("a", None, None), ("b", None, None)
PROMPT, ANSWER = [*range(100)], [*range(200, 260)]


def index_of(*answers: tuple, max_answers: int = 10) -> AnswerIndex:
    index = AnswerIndex(max_answers)
    for answer in answers:
        index.add(*answer)
    return index


def test_the_same_prompt():
    index = index_of((ONE, PROMPT, ANSWER))
    assert [*index.find_by_prompt(ONE, PROMPT)] == ANSWER
    assert [*index.find_by_prompt(ONE, [])] == []


def test_a_prompt_with_the_same_end():
    index = index_of((ONE, PROMPT, ANSWER), (ONE, [5, *PROMPT[50:]], ANSWER[::-1]))
    assert [*index.find_by_prompt(ONE, [9, *PROMPT[1:]])] == ANSWER
    assert [*index.find_by_prompt(ONE, [9, 9, *PROMPT[-16:]])] == ANSWER[::-1]
    assert [*index.find_by_prompt(ONE, [*PROMPT[:-1], 9])] == []


def test_the_middle_of_an_answer():
    index = index_of((ONE, PROMPT, ANSWER))
    places = [index.find(ONE, ANSWER[end - GRAM : end])[1] for end in range(GRAM, len(ANSWER) + 1)]
    found = [place for place in places if place]
    assert len(found) >= len(places) // 4
    assert all(place == end for end, place in enumerate(places, GRAM) if place)
    assert index.find(ONE, [1, 2, 3, 4, 5, 6]) == ((), 0)


def test_scopes_are_apart():
    index = index_of((ONE, PROMPT, ANSWER))
    assert [*index.find_by_prompt(TWO, PROMPT)] == []
    assert index.find(TWO, ANSWER[:GRAM]) == ((), 0)
    index.add(TWO, PROMPT, ANSWER[::-1])
    assert [*index.find_by_prompt(ONE, PROMPT)] == ANSWER
    assert [*index.find_by_prompt(TWO, PROMPT)] == ANSWER[::-1]


def test_a_new_answer_takes_the_place_of_the_old_one():
    index = index_of((ONE, PROMPT, ANSWER), (ONE, PROMPT, [7, 8]))
    assert (len(index), [*index.find_by_prompt(ONE, PROMPT)]) == (1, [7, 8])
    assert index.find(ONE, ANSWER[:GRAM]) == ((), 0)
    index.add(ONE, PROMPT, [])
    assert len(index) == 0


def test_the_least_recently_used_is_dropped_and_leaves_nothing():
    index = index_of(max_answers=2)
    for number in range(3):
        index.add(ONE, [number, *PROMPT], [number, *ANSWER])
        index.find_by_prompt(ONE, [0, *PROMPT])
    assert [*index.find_by_prompt(ONE, [0, *PROMPT])][0] == 0
    assert len(index) == 2
    rng = random.Random(1)
    for _ in range(200):
        ids = [rng.randrange(9) for _ in range(rng.randrange(60))]
        index.add(rng.choice((ONE, TWO)), ids[:20], ids)
    assert len(index) == 2
    keys = sum(len(places) for places in index._places.values())
    assert keys <= sum(len([*answer.entries()]) for answer in index._answers.values())
    index.clear()
    assert (len(index), index._places) == (0, {})


def test_long_answers_are_cut_off():
    index = index_of((ONE, PROMPT, [1] * (2 * MAX_TOKENS)))
    assert len(index.find_by_prompt(ONE, PROMPT)) == MAX_TOKENS


def test_memory_is_bounded_too():
    index = AnswerIndex(10**6, max_bytes=20_000)
    for number in range(30):
        index.add(ONE, [number, *PROMPT], [*range(100 * number, 100 * number + 60)])
    assert 20_000 - 3000 < index._num_bytes <= 20_000
    assert index._num_bytes == sum(answer.num_bytes for answer in index._answers.values())
    assert [*index.find_by_prompt(ONE, [29, *PROMPT])] == [*range(2900, 2960)]
    index.clear()
    assert index._num_bytes == 0


@pytest.mark.parametrize("num_tokens", [4, 50, MAX_TOKENS])
def test_an_answer_takes_no_more_memory_than_is_counted(num_tokens: int):
    rng, count = random.Random(1), 4 * MAX_TOKENS // num_tokens

    def ids(length: int) -> list[int]:
        return [rng.randrange(150_000) for _ in range(length)]

    texts = [(ids(80), ids(num_tokens)) for _ in range(count)]
    tracemalloc.start()
    index = index_of(*((ONE, *text) for text in texts), max_answers=count)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.5 * index._num_bytes < num_bytes < 1.2 * index._num_bytes


@pytest.mark.parametrize(("text", "number", "shared"), [("0", 0, False), ("7:shared", 7, True)])
def test_the_setting(text: str, number: int, shared: bool):
    config = ParseConfig(reuse_answers=text)
    assert (config.max_reused_answers, config.shares_unscoped) == (number, shared)


@pytest.mark.parametrize("text", ["", "-1", "5:all", "shared", "1000001", "5:", "5:shared:shared"])
def test_bad_settings(text: str):
    with pytest.raises(ConfigError, match=r"--parse-reuse-answers: got .*; use a whole number"):
        ParseConfig(reuse_answers=text)
