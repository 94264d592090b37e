"""How many tokens of a head's proposals are expected to be accepted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from sglang_parse.core.phases import Draft
from sglang_parse.core.proposals import ProposalAcceptance
from sglang_parse.core.round import Round

LONGEST, MEMORY = 7, 96.0
STEP_MS, PASS_MS = 1.3, 10.0
"""Of a draft step, and of a pass: as on two cores."""


def proposal(length: int, num_output: int) -> Round:
    return Round(Draft([*range(length)], "mtp"), num_output)


def decode(accepts: Callable[[int], bool], num_tokens: int = 3000) -> tuple[Counter[int], float]:
    """Lengths that are chosen for an answer, and output tokens per ms; ``accepts``: whether the
    head is right about a token."""
    acceptance = ProposalAcceptance(LONGEST, 1 / 32)
    chosen, at, ms = Counter[int](), 0, 0.0
    while at < num_tokens:
        length = max(
            range(LONGEST, 0, -1), key=lambda n: acceptance.expect(n) / (PASS_MS + STEP_MS * n)
        )
        num_output = next((n for n in range(length) if not accepts(at + n)), length)
        acceptance.observe(proposal(length, num_output), MEMORY)
        chosen[length] += 1
        ms += PASS_MS + STEP_MS * length
        at += 1 + num_output
    return chosen, at / ms


def fixed(accepts: Callable[[int], bool], length: int, num_tokens: int = 3000) -> float:
    """Output tokens per ms of one length."""
    at, ms = 0, 0.0
    while at < num_tokens:
        at += 1 + next((n for n in range(length) if not accepts(at + n)), length)
        ms += PASS_MS + STEP_MS * length
    return at / ms


def test_before_the_first_one_and_behind_many():
    acceptance = ProposalAcceptance(LONGEST, 1 / 32)
    expected = [acceptance.expect(length) for length in range(1, 8)]
    assert expected == sorted(expected)
    for _ in range(500):
        acceptance.observe(proposal(3, 2), MEMORY)
    assert acceptance.expect(3) == pytest.approx(3, rel=0.01)
    assert acceptance.expect(7) < 3.3  # the third token is always refused


def test_a_length_that_is_not_proposed_is_tried_again():
    """As the places of others say, and somewhat more."""
    acceptance = ProposalAcceptance(LONGEST, 1 / 32)
    for _ in range(100):
        acceptance.observe(proposal(5, 0), MEMORY)
    low = acceptance.expect(5)
    for _ in range(400):
        acceptance.observe(proposal(2, 2), MEMORY)
    assert low < 1.2 < 3 < acceptance.expect(5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("chance", [0.3, 0.6, 0.8, 0.95])
def test_chance(chance: float, seed: int):
    """Nearly what the best fixed length would bring."""
    drawn = random.Random(seed)
    right = [drawn.random() < chance for _ in range(3100)]
    best = max(fixed(right.__getitem__, length) for length in range(1, 8))
    assert decode(right.__getitem__)[1] > 0.93 * best


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sizes", [(3, 3), (3, 5), (5, 5), (4, 6), (5, 7), (2, 8), (6, 9)])
def test_records(sizes: tuple[int, int], seed: int):
    """What begins each of them is hardly known: there proposals had better end."""
    drawn, begins, at = random.Random(seed), set[int](), 0
    while at < 3100:
        at += drawn.randint(*sizes)
        begins.add(at)
    right = [drawn.random() < (0.3 if at in begins else 0.97) for at in range(3100)]
    by_length = [fixed(right.__getitem__, length) for length in range(1, 8)]
    _, found = decode(right.__getitem__)
    assert found > 0.93 * max(by_length)
    assert found > 1.03 * by_length[2]  # stock SGLang's length


def test_an_answer_that_changes():
    chosen, _ = decode(lambda at: at < 1500 or at % 2 == 0)
    assert chosen[7] > 100
    assert chosen[1] + chosen[2] > 200
