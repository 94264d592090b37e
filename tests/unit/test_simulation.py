"""Simulated acceptance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.doubt import LEVELS, own_chance
from sglang_parse.core.segment import evenly_spaced
from sglang_parse.core.setting import ConfigError
from sglang_parse.core.simulation import (
    BLOCK_ENV_VAR,
    CYCLE,
    ENV_VAR,
    SimulatedAcceptance,
    block_tokens,
    place_of,
)

pytestmark = pytest.mark.unit

SIXTEENTHS = range(32, 513, 32)


@pytest.mark.parametrize(
    ("fraction", "accepted_len"), [(0, 0), (0.25, 128), (0.5, 256), (0.75, 384), (1, 512)]
)
def test_a_prefix_with_the_exact_fraction_is_accepted_every_time(
    fraction: float, accepted_len: int
):
    simulated = SimulatedAcceptance(fraction)
    assert [simulated.accepted_len(512, SIXTEENTHS) for _ in range(5)] == [accepted_len] * 5


def test_rounding_errors_carry_over_to_later_drafts():
    simulated = SimulatedAcceptance(0.25)
    assert [simulated.accepted_len(8, [8]) for _ in range(8)] == [0, 0, 8, 0, 0, 0, 8, 0]


def test_the_carry_over_is_at_most_one_draft():
    simulated = SimulatedAcceptance(0.5)
    for _ in range(100):
        assert simulated.accepted_len(100, [10]) == 10
    assert simulated.accepted_len(10, range(1, 11)) == 10
    assert [simulated.accepted_len(10, range(1, 11)) for _ in range(30)][-1] == 5


def refused(seed: int, *, length: int, every: float = 32, start: int = 0) -> list[int]:
    """Places where drafts of ``length`` tokens, one behind another's refusal, are refused."""
    found = SimulatedAcceptance.from_env(ParseConfig(), {ENV_VAR: f"every:{every}:{seed}"})
    assert found
    assert found.adapts_len
    place, places = start, []
    while place < start + 50_000:
        accepted = found.accepted_len(length, range(1, length + 1), place)
        place += accepted + 1  # and the target's token
        if accepted < length:
            places.append(place - 1)
    return places


@pytest.mark.parametrize("every", [12, 32, 90])
def test_a_token_is_refused_every_so_many_wherever_drafts_begin(every: int):
    """As often in long drafts as in short ones: by the place, which a seed decides."""
    places = refused(1, length=4096, every=every)
    assert len(places) == pytest.approx(50_000 / every, rel=0.12)
    gaps = [after - before for before, after in zip(places, places[1:], strict=False)]
    assert len({*gaps}) > every  # no fixed distance
    assert sum(gap < every for gap in gaps) == pytest.approx(0.63 * len(gaps), rel=0.08)
    assert places == refused(1, length=4096, every=every)
    assert {*refused(1, length=16, every=every)} <= {*places}
    assert places[:9] != refused(2, length=4096, every=every)[:9]


def test_the_draws_of_a_text_repeat_after_a_cycle():
    places = refused(0, length=64)
    assert refused(0, length=64, start=CYCLE) == [place + CYCLE for place in places]


def test_a_refused_token_ends_the_prefix_before_it():
    (place, *_), found = refused(0, length=4096), SimulatedAcceptance.refusals(32)
    assert found.accepted_len(4096, range(16, 4097, 16)) == place // 16 * 16
    assert found.accepted_len(place, [place]) == place
    assert found.accepted_len(place + 1, [place + 1]) == 0


def test_the_same_refusals_in_doubt():
    """Every refused token is unsure, and as many others as the lowest level's own chance says."""
    sure, unsure = (
        SimulatedAcceptance.from_env(ParseConfig(), {ENV_VAR: f"{way}:32:7"})
        for way in ("every", "doubt")
    )
    known, rest = [3, 5] * (CYCLE // 2), [LEVELS - 1]
    assert sure.levels(0, known) == known
    levels = unsure.levels(5 * CYCLE, known)
    accepted = [one.accepted_len(1, [1], place) for place in range(CYCLE) for one in (sure, unsure)]
    assert accepted[::2] == accepted[1::2]
    assert {*levels} == {0, *rest}
    doubted = [took for took, level in zip(accepted[::2], levels, strict=True) if not level]
    assert accepted[::2].count(0) == doubted.count(0)
    assert doubted.count(1) / len(doubted) == pytest.approx(own_chance(0), abs=0.03)
    assert unsure.levels(9, known[:5]) == levels[9:14]
    assert SimulatedAcceptance.refusals(9e9, in_doubt=True).levels(0, [5, 5]) == [0, *rest]


def test_where_a_text_starts_depends_on_its_prompt():
    starts = {place_of([*range(length), last], 0) for length in (5, 500) for last in (1, 2)}
    assert len(starts) == 4
    assert place_of([1, 2], 7) == place_of([1, 2], 0) + 7


@given(
    fraction=st.floats(0, 1),
    drafts=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 16)), min_size=1, max_size=60),
)
def test_the_average_is_the_configured_fraction(fraction: float, drafts: list[tuple[int, int]]):
    simulated = SimulatedAcceptance(fraction)
    accepted = drafted = longest = 0
    for length, max_prefixes in drafts:
        ends = evenly_spaced(range(1, length + 1), max_prefixes)
        accepted_len = simulated.accepted_len(length, ends)
        assert accepted_len == 0 or accepted_len in ends
        accepted, drafted, longest = accepted + accepted_len, drafted + length, max(longest, length)
    assert abs(accepted - fraction * drafted) <= longest + 1e-6


@pytest.mark.parametrize(
    "text",
    [
        *("1.5", "-0.1", "nan", "half", "75%"),
        *("every:0.5", "every:", "every:65536", "every:9:x", "doubt:0"),
    ],
)
def test_other_values_are_refused(text: str):
    with pytest.raises(ConfigError, match=rf"{ENV_VAR} is '{text}'; use a number from 0"):
        SimulatedAcceptance.from_env(ParseConfig(), {ENV_VAR: text})


def test_token_verification_refuses_simulated_acceptance():
    with pytest.raises(ConfigError, match=rf"{ENV_VAR} is '0.5', but --parse-verification token"):
        SimulatedAcceptance.from_env(ParseConfig(verification="token"), {ENV_VAR: "0.5"})


@pytest.mark.parametrize("environ", [{}, {ENV_VAR: ""}])
def test_unset_disables_simulated_acceptance(environ: dict[str, str]):
    assert SimulatedAcceptance.from_env(ParseConfig(), environ) is None


@pytest.mark.parametrize("text", ["0.5", "17", "nan", "many"])
def test_blocks_add_1_to_16_tokens(text: str):
    with pytest.raises(ConfigError, match=rf"{BLOCK_ENV_VAR} is '{text}'; use a number from 1"):
        block_tokens({BLOCK_ENV_VAR: text})
    assert block_tokens({BLOCK_ENV_VAR: ""}) is None
