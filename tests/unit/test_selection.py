"""The accepted prefix of a draft."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_parse.core.selection import (
    SELECTIONS,
    matched_prefixes,
    matching_tokens,
    select,
)

pytestmark = pytest.mark.unit

ENDS = [3, 7, 8, 12]


@pytest.mark.parametrize(
    ("verdicts", "accepted_len", "decided_by"),
    [
        ([0.9, 0.9, 0.9, 0.9], 12, 3),
        ([0.9, 0.1, 0.9, 0.1], 3, 1),  # a late accept has no effect
        ([0.1, 0.9, 0.9, 0.9], 0, 0),
        ([0.9, 0.9, 0.9, 0.1], 8, 3),
        ([0.1, 0.1, 0.1, 0.1], 0, 0),
        ([0.5, 0.5, 0.4999, 0.0], 7, 2),  # a tie at the threshold accepts
    ],
)
def test_first_reject(verdicts, accepted_len, decided_by):
    found = select(verdicts, ENDS, 0.5, "first-reject")
    assert found == (accepted_len, decided_by)


@pytest.mark.parametrize("selection", sorted(SELECTIONS))
def test_no_prefix_accepts_nothing(selection):
    assert select([], [], 0.5, selection)[0] == 0


@pytest.mark.parametrize("selection", sorted(SELECTIONS))
def test_a_threshold_above_one_accepts_nothing(selection):
    assert select([1.0] * 4, ENDS, math.nextafter(1.0, 2.0), selection)[0] == 0
    assert select([1.0] * 4, ENDS, 1.0, selection)[0] == 12


@pytest.mark.parametrize("selection", sorted(SELECTIONS))
def test_a_threshold_of_zero_accepts_everything(selection):
    assert select([0.0] * 4, ENDS, 0.0, selection)[0] == 12


@pytest.mark.parametrize("selection", sorted(SELECTIONS))
@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.1])
def test_a_nan_verdict_accepts_nothing(selection, threshold):
    assert select([math.nan], [3], threshold, selection)[0] == 0


def test_verdicts_and_prefixes_must_match():
    with pytest.raises(ValueError, match="3 verdicts for 4 prefixes"):
        select([0.9] * 3, ENDS, 0.5, "first-reject")


@given(st.lists(st.floats(0, 1)), st.floats(0, 1.1))
def test_first_reject_accepts_all_before_the_first_rejected_prefix(verdicts, threshold):
    first = num_accepted(verdicts, threshold, "first-reject")
    assert all(verdict >= threshold for verdict in verdicts[:first])
    assert all(verdict < threshold for verdict in verdicts[first : first + 1])


def num_accepted(verdicts, threshold, selection, **options):
    """Returns the number of accepted prefixes; prefix k has k + 1 tokens."""
    return select(verdicts, range(1, len(verdicts) + 1), threshold, selection, **options)[0]


@pytest.mark.parametrize(
    ("verdicts", "accepted_len", "decided_by"),
    [
        ([0.9, 0.1, 0.9, 0.9], 12, 3),  # the finished answer is accepted despite a rejected prefix
        ([0.1, 0.1, 0.1, 0.5], 12, 3),  # a tie at the threshold accepts
        ([0.9, 0.9, 0.1, 0.1], 7, 2),  # the finished answer is rejected
        ([0.9, 0.9, 0.9, 0.1], 8, 3),
        ([0.9, 0.9, 0.9, math.nan], 8, 3),
        ([0.1, 0.9, 0.9, 0.1], 0, 0),
    ],
)
def test_answer_first(verdicts, accepted_len, decided_by):
    decided = select(verdicts, ENDS, 0.5, "answer-first", is_finished=True)
    assert decided == (accepted_len, decided_by)


@given(st.lists(st.floats(0, 1)), st.floats(0, 1.1), st.booleans())
def test_answer_first_is_first_reject_unless_the_answer_is_accepted(
    verdicts, threshold, is_finished
):
    is_answer_accepted = is_finished and bool(verdicts) and verdicts[-1] >= threshold
    answer_first = num_accepted(verdicts, threshold, "answer-first", is_finished=is_finished)
    first = num_accepted(verdicts, threshold, "first-reject", is_finished=is_finished)
    assert answer_first == (len(verdicts) if is_answer_accepted else first)


@given(
    st.lists(st.floats(0, 1)), st.floats(0, 1.1), st.sampled_from(sorted(SELECTIONS)), st.booleans()
)
def test_the_deciding_verdict_determines_the_accepted_prefix(
    verdicts, threshold, selection, is_finished
):
    """It accepts its prefix, or it rejects and the prefix before it is accepted."""
    ends = list(range(1, len(verdicts) + 1))
    decided = select(verdicts, ends, threshold, selection, is_finished=is_finished)
    accepted_len, decided_by = decided
    if decided_by is None:
        assert accepted_len == 0
    else:
        assert accepted_len == decided_by + (verdicts[decided_by] >= threshold)


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


@pytest.mark.parametrize(
    ("num_matched", "counts"), [(0, (0, 0)), (1, (0, 0)), (2, (1, 0)), (4, (2, 1)), (6, (3, 2))]
)
def test_matched_prefixes_are_those_within_the_matching_tokens(num_matched, counts):
    assert matched_prefixes([2, 4, 6], [0.5, 0.2, 0.4], 0.5, num_matched) == counts
