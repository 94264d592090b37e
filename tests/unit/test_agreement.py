"""Matched tokens after a rejection point."""

from __future__ import annotations

import pytest

from sglang_parse.core.policy.agreement import Agreement

pytestmark = pytest.mark.unit

PRIOR = 0.04
"""Largest share of the prior in an estimate from ``observed``: it weighs as much as one reject of
31, and as 8 accepted tokens of 3,008."""


def observed(rejected_len: int, num_matched: int, num_mismatched: int = 0) -> Agreement:
    """Thirty drafts of 100 accepted tokens each, all rejected alike."""
    agreement = Agreement()
    for _ in range(30):
        agreement.observe_accepted(100, num_mismatched)
        agreement.observe_reject(rejected_len, num_matched)
    return agreement


def test_no_matches_if_the_target_never_agreed():
    after = observed(10, 0, num_mismatched=100).after_reject(10, 40)
    assert after.num_matched == pytest.approx(0, abs=0.1)


def test_partial_matches_scale_with_the_rejected_length():
    agreement = observed(10, 5)
    assert agreement.after_reject(10, 40).num_matched == pytest.approx(5, rel=PRIOR)
    long = agreement.after_reject(40, 40)
    assert long.num_matched == pytest.approx(20, rel=PRIOR)


def test_all_tokens_match_if_the_target_disagrees_with_the_verdict():
    after = observed(10, 40).after_reject(10, 60)
    assert after.num_matched == pytest.approx(60, rel=PRIOR)
    assert after.max_matched == pytest.approx(60, rel=PRIOR)


def test_mismatches_in_accepted_text_shorten_the_match():
    """Every tenth token of correct text differs."""
    agreement = observed(10, 40, num_mismatched=10)
    assert agreement.after_reject(10, 60).num_matched == pytest.approx(10, rel=PRIOR)


def test_estimates_stay_in_range():
    for agreement in (Agreement(), observed(10, 0), observed(10, 40), observed(10, 5, 3)):
        for rejected_len, num_verified in ((1, 1), (8, 8), (8, 128)):
            after = agreement.after_reject(rejected_len, num_verified)
            assert 0 <= after.num_matched <= after.max_matched + 1e-9 <= num_verified + 1e-9


def test_observations_decay():
    agreement = observed(10, 40)
    agreement.decay(1e-6)
    fresh = Agreement().after_reject(10, 60)
    assert [*agreement.after_reject(10, 60)] == pytest.approx([*fresh], rel=0.01)
