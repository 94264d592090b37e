"""Drafts from the prompt: how long they are, what they bring, and what they may lose."""

from __future__ import annotations

import random
from functools import cache
from statistics import geometric_mean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_parse.core.copies import CHANCES, SURE, CopyLength, CopyStats
from sglang_parse.core.loss import Budget
from sglang_parse.core.policy.constants import DEFAULTS
from sglang_parse.core.policy.texts import TextLength, TextSourceStats
from sglang_parse.core.prompt_match import PromptMatch
from sglang_parse.core.request_text import RequestText
from sglang_parse.core.round import Round
from support.own_answers import KINDS, own_answers
from support.prompt_replay import (
    COSTS,
    FailingMatch,
    Replay,
    Replayed,
    by_kind,
    dropped_per_draft,
    speedup,
)
from support.rounds import round_of

pytestmark = pytest.mark.unit

devices = pytest.mark.parametrize("device", COSTS)


@cache
def answers() -> list[dict[str, Any]]:
    return [*own_answers()]


def replayed(device: str, **options: Any) -> dict[str, list[Replayed]]:
    return by_kind(answers(), Replay(COSTS[device], **options))


def new_length(stats: CopyStats | None = None, max_loss: float = DEFAULTS.text_loss) -> CopyLength:
    return CopyLength(
        stats or CopyStats(), Budget(max_loss, DEFAULTS.text_loss_rate, DEFAULTS.text_gain)
    )


def outcome(num_drafted: int, num_accepted: int) -> Round:
    return round_of(num_drafted, num_drafted, num_accepted)


# -- answers that copy, and others ------------------------------------------------------------


@devices
@pytest.mark.parametrize("overlap", ["off", "armed"])
def test_every_kind_gains(device: str, overlap: str):
    """Least speedups of the repository's own texts; real answers: ``support.prompt_replay``."""
    found = replayed(device, overlap=overlap)
    least = {"gpu": (2.0, 1.4), "cpu": (1.5, 1.15)}[device]
    for kind in KINDS:
        assert speedup(found[kind]) > least[kind not in ("edited", "blocks")], kind
    assert speedup(found["unrelated"]) >= 1.0
    assert speedup(found["noise"]) >= 0.985


@devices
def test_arming_drops_no_step_and_costs_little(device: str):
    found = {overlap: replayed(device, overlap=overlap) for overlap in ("off", "armed", "dropped")}
    assert dropped_per_draft(found["armed"]) == 0
    assert dropped_per_draft(found["dropped"]) > 0.1
    each = {name: {kind: speedup(of[kind]) for kind in of} for name, of in found.items()}
    kept = {kind: each["armed"][kind] / each["off"][kind] for kind in each["off"]}
    # Five texts of a kind scatter by 0.04, and change with the repository.
    assert min(kept.values()) > 0.87, kept
    assert geometric_mean(kept.values()) > 0.95, kept
    assert geometric_mean(each["armed"].values()) > geometric_mean(each["dropped"].values())


# -- the bound ----------------------------------------------------------------------------------


@devices
@pytest.mark.parametrize("overlap", ["off", "armed"])
@pytest.mark.parametrize(("num_tokens", "least"), [(56, 0.975), (150, 0.985), (1000, 0.985)])
def test_copies_that_all_fail_cost_little(device: str, overlap: str, num_tokens: int, least: float):
    """Each alone: what others have learned of failures would help."""
    worst = 1.0
    for one in answers():
        if len(one["answer"]) >= num_tokens or one["kind"] == "noise":
            replay = Replay(COSTS[device], overlap=overlap, match=FailingMatch)
            answer = (one["answer"] * (1 + num_tokens // len(one["answer"])))[: num_tokens + 1]
            worst = min(worst, replay.run(one["prompt"], answer).speedup)
    assert worst >= least


def lucky(seed: int, least: int, most: int, num_tokens: int = 57) -> tuple[list[int], list[int]]:
    """A prompt, and an answer of short pieces of it: copies that go on for a token or two."""
    rng, answer = random.Random(seed), list[int]()
    prompt = [rng.randrange(300) for _ in range(400)]
    while len(answer) <= num_tokens:
        start = rng.randrange(400 - most)
        answer += prompt[start : start + rng.randint(least, most)]
        answer += [rng.randrange(300)] * rng.randint(0, 1)
    return prompt, answer[: num_tokens + 1]


@devices
@pytest.mark.parametrize(("least", "most"), [(1, 3), (2, 4), (3, 5), (4, 6)])
def test_copies_by_chance_give_no_more_to_lose(device: str, least: int, most: int):
    """Beyond the budget only waits are lost whose copy did go on: no more than the first tries."""
    for seed in range(30):
        found = Replay(COSTS[device], overlap="armed").run(*lucky(seed, least, most))
        loss = found.cost - found.num_tokens
        assert loss <= DEFAULTS.text_loss + DEFAULTS.text_loss_rate * found.num_tokens + 0.75


def test_one_wait_is_refunded_and_nothing_else():
    length = new_length()
    length.observe(9, outcome(2, 0), 0.4)
    length.lose(0.1)
    length.lose(0.1)
    length.refund(1)  # by chance
    assert length.net_loss == pytest.approx(0.6)
    for _ in range(3):
        length.refund(4)
    assert length.net_loss == pytest.approx(0.5)


@given(
    st.lists(
        st.tuples(st.integers(1, 300), st.integers(1, 400), st.floats(0, 1), st.floats(0.001, 2))
    )
)
@settings(max_examples=100, deadline=None)
def test_no_request_loses_more_than_its_budget(rounds: list):
    length, written, lost = new_length(), 1, 0.0
    for match_len, limit, fits, row in rounds:

        def cost(num_tokens: int, row: float = row) -> float:
            return row * (1 + num_tokens)

        count = length.choose(match_len, limit, written, cost)
        assert 0 <= count <= min(limit, 256)
        right = round(fits * count)
        if count:
            length.observe(match_len, outcome(count, right), cost(count))
            lost += cost(count) - right
        else:
            length.watch(match_len, fits=fits > 0.5)
        written += right + 1
        assert lost <= DEFAULTS.text_loss + DEFAULTS.text_loss_rate * written + 1e-9


def test_a_sure_copy_drafts_where_a_pass_costs_more_than_may_be_lost_at_first():
    """A pass takes a fifth longer than a step, whatever its rows, and six requests share it: none
    would ever try, and none would ever learn that drafts bring more."""
    match, length = PromptMatch([*range(100, 200)]), new_length()
    text, drafted = RequestText(match, length), 0
    for place in range(100, 140):
        text.follow([*range(100, place)])
        rest = match.rest(64)
        drafted = length.choose(match.match_len, len(rest), place - 100, lambda n: 1.2 + 0.1 * n)
        if drafted:
            break
    assert drafted
    assert SURE <= match.match_len < SURE + 3


def test_texts_of_a_request_share_one_budget():
    budget = Budget(1.0, 0.01, 8.0)
    copies = CopyLength(CopyStats(), budget)
    prediction = TextLength(TextSourceStats(DEFAULTS), budget)
    assert copies.choose(40, 99, 0, lambda _: 0.5) > 0
    prediction.lose(0.6)
    assert copies.left(0) == pytest.approx(0.4)
    assert copies.choose(40, 99, 0, lambda _: 0.5) == 0
    assert (copies.net_loss, prediction.net_loss) == (0, 0.6)


# -- lengths ------------------------------------------------------------------------------------


def test_the_longer_the_match_the_longer_the_draft():
    lengths = [new_length().choose(n, 256, 1, lambda n: 0.1 + 0.004 * n) for n in (1, 4, 16, 64)]
    assert lengths == sorted(lengths)
    assert lengths[0] <= 6
    assert lengths[-1] >= 96


def test_a_draft_has_to_bring_more_than_what_else_would_draft():
    def choose(match_len: int, rival: float, max_loss: float = 9.0) -> int:
        length = new_length(max_loss=max_loss)
        return length.choose(match_len, 64, 1, lambda n: 0.1 + 0.01 * n, rival=rival)

    assert choose(1, 1.0) > 0
    assert choose(1, 1.5) == choose(8, 9.0) == 0
    assert choose(64, 2.0) > 32


def test_one_requests_copies_are_corrected_alone():
    stats = CopyStats()
    lucky, other = new_length(stats, 99.0), new_length(stats, 99.0)

    def choose(length: CopyLength) -> int:
        return length.choose(2, 256, 1, lambda n: 0.1 * n)

    first = choose(other)
    for _ in range(20):
        lucky.observe(2, outcome(2, 2), 0.1)
    assert choose(lucky) > first
    unlucky = new_length(CopyStats(), 99.0)
    for _ in range(6):
        unlucky.observe(2, outcome(2, 0), 0.1)
    assert choose(unlucky) < first


def test_chances_are_learned():
    stats = CopyStats()
    length = new_length(stats)
    for _ in range(2000):
        length.watch(1, fits=False)
        length.watch(500, fits=True)
    assert stats.chances[0] < 0.01
    assert stats.chances[-1] > CHANCES[-1]
    assert stats.chances[1:-1] == [*CHANCES[1:-1]]
