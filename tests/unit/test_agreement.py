"""What follows a cut, by what was seen of others."""

from __future__ import annotations

import pytest

from sglang_parse.core.policy.agreement import Agreement

pytestmark = pytest.mark.unit


def seen(stretch: int, matched: int, differing: int = 0) -> Agreement:
    """Thirty drafts of 100 kept tokens each, all cut alike."""
    agreement = Agreement()
    for _ in range(30):
        agreement.observe_accepted(100, differing)
        agreement.observe_reject(stretch, matched)
    return agreement


def test_nothing_comes_where_the_target_never_agreed():
    behind = seen(stretch=10, matched=0, differing=100).behind(10, 40, rest=12)
    assert behind.matched == pytest.approx(0, abs=0.5)
    assert behind.written == pytest.approx(12, abs=0.5)


def test_half_of_a_stretch_is_half_of_a_longer_one():
    agreement = seen(stretch=10, matched=5)
    assert agreement.behind(10, 40, rest=12).matched == pytest.approx(5, rel=0.05)
    long = agreement.behind(40, 40, rest=12)
    assert long.matched == pytest.approx(20, rel=0.05)
    assert long.written == pytest.approx(0, abs=0.1)  # its segment ended meanwhile


def test_a_verdict_that_the_target_does_not_share_lets_all_come():
    behind = seen(stretch=10, matched=40).behind(10, 60, rest=12)
    assert behind.matched == pytest.approx(60, rel=0.15)
    assert behind.reach == pytest.approx(60, rel=0.1)


def test_other_words_for_the_same_end_it_sooner():
    """Every tenth token of right text is another one."""
    agreement = seen(stretch=10, matched=40, differing=10)
    assert agreement.behind(10, 60, rest=12).matched == pytest.approx(10, rel=0.15)


def test_never_more_than_was_judged_nor_less_than_nothing():
    for agreement in (Agreement(), seen(10, 0), seen(10, 40), seen(10, 5, differing=3)):
        for stretch, judged, rest in ((1, 1, 1), (8, 8, 30), (8, 128, 2)):
            behind = agreement.behind(stretch, judged, rest)
            assert 0 <= behind.matched <= behind.reach + 1e-9 <= judged + 1e-9
            assert 0 <= behind.written <= rest


def test_what_was_seen_fades():
    agreement = seen(stretch=10, matched=40)
    agreement.fade(1e-6)
    fresh = Agreement().behind(10, 60, rest=12)
    assert [*agreement.behind(10, 60, rest=12)] == pytest.approx([*fresh], rel=0.01)
