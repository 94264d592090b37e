"""Simulated acceptance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.segment import evenly_spaced
from sglang_parse.core.setting import ConfigError
from sglang_parse.core.simulation import ENV_VAR, SimulatedAcceptance

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


@pytest.mark.parametrize("text", ["1.5", "-0.1", "nan", "half", "75%"])
def test_values_outside_0_to_1_are_refused(text: str):
    with pytest.raises(ConfigError, match=rf"{ENV_VAR} is '{text}'; use a number from 0"):
        SimulatedAcceptance.from_env(ParseConfig(), {ENV_VAR: text})


def test_token_verification_refuses_simulated_acceptance():
    with pytest.raises(ConfigError, match=rf"{ENV_VAR} is '0.5', but --parse-verification token"):
        SimulatedAcceptance.from_env(ParseConfig(verification="token"), {ENV_VAR: "0.5"})


@pytest.mark.parametrize("environ", [{}, {ENV_VAR: ""}])
def test_unset_disables_simulated_acceptance(environ: dict[str, str]):
    assert SimulatedAcceptance.from_env(ParseConfig(), environ) is None
