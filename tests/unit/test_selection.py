"""Verdicts to cut."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_parse.core.selection import (
    SELECTIONS,
    first_reject,
    longest_accepted,
    matching_tokens,
    select_cut,
)

pytestmark = pytest.mark.unit

ENDS = [3, 7, 8, 12]


@pytest.mark.parametrize(
    ("verdicts", "first", "longest"),
    [
        ([0.9, 0.9, 0.9, 0.9], 12, 12),
        ([0.9, 0.1, 0.9, 0.1], 3, 8),  # a late accept counts for longest only
        ([0.1, 0.9, 0.9, 0.9], 0, 12),
        ([0.9, 0.9, 0.9, 0.1], 8, 8),
        ([0.1, 0.1, 0.1, 0.1], 0, 0),
        ([0.5, 0.5, 0.4999, 0.0], 7, 7),  # a tie at the threshold accepts
    ],
)
def test_the_two_selections(verdicts, first, longest):
    assert select_cut(verdicts, ENDS, 0.5, "first-reject") == first
    assert select_cut(verdicts, ENDS, 0.5, "longest") == longest


@pytest.mark.parametrize("selection", sorted(SELECTIONS))
def test_no_prefix_keeps_nothing(selection):
    assert select_cut([], [], 0.5, selection) == 0


@pytest.mark.parametrize("selection", sorted(SELECTIONS))
def test_a_threshold_above_one_accepts_nothing(selection):
    assert select_cut([1.0] * 4, ENDS, math.nextafter(1.0, 2.0), selection) == 0
    assert select_cut([1.0] * 4, ENDS, 1.0, selection) == 12


@pytest.mark.parametrize("selection", sorted(SELECTIONS))
def test_a_threshold_of_zero_accepts_everything(selection):
    assert select_cut([0.0] * 4, ENDS, 0.0, selection) == 12


@pytest.mark.parametrize("selection", sorted(SELECTIONS))
@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.1])
def test_a_verdict_that_is_no_number_accepts_nothing(selection, threshold):
    assert select_cut([math.nan], [3], threshold, selection) == 0


def test_verdicts_and_prefixes_must_match():
    with pytest.raises(ValueError, match="3 verdicts for 4 prefixes"):
        select_cut([0.9] * 3, ENDS, 0.5, "longest")


@given(st.lists(st.floats(0, 1)), st.floats(0, 1.1))
def test_first_reject_is_never_longer_and_all_it_keeps_is_accepted(verdicts, threshold):
    first, longest = first_reject(verdicts, threshold), longest_accepted(verdicts, threshold)
    assert 0 <= first <= longest <= len(verdicts)
    assert all(verdict >= threshold for verdict in verdicts[:first])
    assert all(verdict < threshold for verdict in verdicts[first : first + 1] + verdicts[longest:])
    assert longest == 0 or verdicts[longest - 1] >= threshold


@pytest.mark.parametrize(
    ("draft", "target_choice", "matched"),
    [
        ([], [5], 0),
        ([5, 6], [5, 6, 7], 2),
        ([5, 6, 7], [5, 9, 7, 8], 1),  # a later match does not count
        ([5], [6, 5], 0),
    ],
)
def test_matching_tokens(draft, target_choice, matched):
    assert matching_tokens(draft, target_choice) == matched
