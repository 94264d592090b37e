"""What calibrate counts and promises: against brute force, SciPy, and simulated repetitions."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sglang_parse.calibrate import certify
from sglang_parse.calibrate.certify import (
    certified_threshold,
    errors_allowed,
    fewest_requests,
    learn_then_test,
    make_grid,
)
from sglang_parse.calibrate.figures import (
    Share,
    costs_of,
    make_rules,
    paired_difference,
    reliability,
    upper_bound,
    whole_wrong_answers,
)
from sglang_parse.calibrate.losses import ANSWER, TOKEN, FirstDraft
from sglang_parse.calibrate.page import render
from sglang_parse.client.records import BenchError
from sglang_parse.core.selection import SELECTIONS, select
from support.calibration import FACTS, calibration

pytestmark = pytest.mark.unit


def draft(verdicts, *, first_wrong=None, finished=True, right=None) -> FirstDraft:
    count = len(verdicts)
    return FirstDraft(
        problem=0,
        verdicts=tuple(verdicts),
        prefix_ends=tuple(range(3, 3 * count + 1, 3)),
        num_drafted=3 * count,
        finished=finished,
        first_wrong=first_wrong,
        is_answer_right=right,
        mass=1.0,
        draft_ms=30.0,
        verify_ms=6.0,
    )


# -- losses ------------------------------------------------------------------------------

verdict_lists = st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.7, 0.9, 1.0]), min_size=1, max_size=6)


@given(verdict_lists, st.data(), st.sampled_from(sorted(SELECTIONS)), st.booleans())
def test_the_loss_is_one_where_the_error_is_kept(verdicts, data, rule, finished):
    """The score against what the server's own selection keeps, at every threshold."""
    wrong = data.draw(st.integers(0, len(verdicts) - 1))
    one = draft(verdicts, first_wrong=wrong, finished=finished)
    score = one.score(rule, TOKEN)
    losses = []
    for threshold in (0.0, 0.05, 0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0):
        cut = select(verdicts, one.prefix_ends, threshold, rule, is_finished=finished).accepted_len
        losses.append(cut >= one.prefix_ends[wrong])
        assert losses[-1] == (score >= threshold)
    assert all(looser >= stricter for looser, stricter in pairwise(losses))


@given(verdict_lists, st.sampled_from(sorted(SELECTIONS)), st.booleans())
def test_a_wrong_answer_is_kept_whole(verdicts, rule, finished):
    one = draft(verdicts, right=False, finished=finished)
    for threshold in (0.0, 0.1, 0.3, 0.5, 0.8, 0.9, 1.0):
        cut = select(verdicts, one.prefix_ends, threshold, rule, is_finished=finished).accepted_len
        assert (cut == one.prefix_ends[-1]) == (one.score(rule, ANSWER) >= threshold)


def test_nothing_is_lost_without_an_error():
    for rule in SELECTIONS:
        assert draft([1.0, 1.0]).score(rule, TOKEN) < 0
        assert draft([1.0, 1.0], right=True).score(rule, ANSWER) < 0
        assert draft([1.0, 1.0], right=None).score(rule, ANSWER) < 0


# -- the test ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alpha", "requests", "allowed"), [(0.05, 300, 8), (0.02, 1000, 12), (0.01, 2000, 12)]
)
def test_errors_allowed(alpha: float, requests: int, allowed: int):
    assert errors_allowed(requests, alpha, 0.05) == allowed
    assert stats.binom.cdf(allowed, requests, alpha) <= 0.05
    assert stats.binom.cdf(allowed + 1, requests, alpha) > 0.05


@pytest.mark.parametrize(("alpha", "fewest"), [(0.05, 59), (0.02, 149), (0.01, 299)])
def test_fewest_requests(alpha: float, fewest: int):
    assert fewest_requests(alpha, 0.05) == fewest
    assert errors_allowed(fewest, alpha, 0.05) == 0
    assert errors_allowed(fewest - 1, alpha, 0.05) == -1


def test_thresholds_are_tested_from_the_strictest_down_to_the_first_that_fails():
    """Errors 0, 2, 40, 41 of 300 at 5 %: eight may be; what is behind the failure is not tested."""
    scores = [0.95] * 2 + [0.75] * 38 + [0.55] + [-1.0] * 259
    tests = learn_then_test(scores, (0.99, 0.9, 0.7, 0.5), 0.05, 0.05)
    assert [test.errors for test in tests] == [0, 2, 40, 41]
    assert [test.certified for test in tests] == [True, True, False, False]
    assert [test.p_value for test in tests] == pytest.approx(
        [stats.binom.cdf(errors, 300, 0.05) for errors in (0, 2, 40, 41)]
    )
    assert certified_threshold(tests).threshold == 0.9


def test_a_strict_threshold_that_fails_ends_it():
    tests = learn_then_test([1.0] * 60 + [-1.0] * 240, (0.99, 0.5), 0.05, 0.05)
    assert certified_threshold(tests) is None


@given(
    st.lists(st.floats(0, 1, width=32) | st.just(-1.0), min_size=1, max_size=200),
    st.sampled_from([0.01, 0.05, 0.2]),
)
def test_certified_is_what_the_exact_binomial_says(scores, alpha):
    """But for one error: mapie rounds a quotient up."""
    grid = (0.99, 0.9, 0.7, 0.5, 0.1, 0.0)
    tests = learn_then_test(scores, grid, alpha, 0.05)
    passed = [test.p_value <= 0.05 for test in tests]
    exact = [all(passed[: place + 1]) for place in range(len(grid))]
    stricter = [stats.binom.cdf(test.errors + 1, len(scores), alpha) <= 0.05 for test in tests]
    for place, test in enumerate(tests):
        assert test.certified <= exact[place]
        assert test.certified >= all(stricter[: place + 1])


def test_a_looser_p_value_than_the_exact_one_is_refused():
    with pytest.raises(BenchError, match="mapie's p-value is 0.01"):
        certify._check(0.5, 0.01, 0.02, 3, 100, 0.1)


def test_the_promise_holds_in_simulated_repetitions():
    """The true loss at the certified threshold is above alpha in at most delta of the repetitions.

    Drafts have an error in 30 of 100, whose score is uniform: the loss at t is 0.3 * (1 - t), above
    alpha where t is below 2/3. 400 repetitions: more than 29 failures have probability 0.02 at the
    promised 5 %.
    """
    random_numbers = np.random.default_rng(7)
    alpha, delta, grid = 0.1, 0.05, tuple(np.linspace(0.999, 0.3, 60))
    failures = certified = 0
    for _ in range(400):
        has_error = random_numbers.random(200) < 0.3
        scores = np.where(has_error, random_numbers.random(200), -1.0)
        best = certified_threshold(learn_then_test(scores.tolist(), grid, alpha, delta))
        certified += best is not None
        failures += best is not None and 0.3 * (1 - best.threshold) > alpha
    assert certified > 390
    assert 2 < failures < 30, "the promise is broken, or the thresholds far too strict"


# -- the grid ----------------------------------------------------------------------------


def test_the_grid_has_points_where_the_verdicts_are():
    """The demo pair's right verdicts lie between 0.998 and 0.9995."""
    numbers = random.Random(1)
    verdicts = [numbers.uniform(0.998, 0.9995) for _ in range(300)] + [1e-4] * 60
    grid = make_grid(verdicts, 40)
    assert list(grid) == sorted(set(grid), reverse=True)
    assert 0.5 in grid
    assert grid[0] == pytest.approx(max(verdicts), abs=1e-6)
    assert sum(0.998 <= threshold <= 0.9995 for threshold in grid) >= 3


def test_a_grid_needs_verdicts():
    with pytest.raises(BenchError, match="--pilot"):
        make_grid([], 40)


@pytest.mark.parametrize("verdicts", [[0.0, 1.0], [1.0] * 5, [0.0] * 5])
def test_verdicts_at_the_edge_make_a_grid(verdicts):
    grid = make_grid(verdicts, 10)
    assert all(0 <= threshold <= 1 for threshold in grid)
    assert 0.5 in grid


# -- figures -----------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "total"), [(0, 20), (3, 20), (20, 20)])
def test_intervals_are_clopper_and_pearsons(count: int, total: int):
    share = Share.of(count, total)
    low = stats.beta.ppf(0.025, count, total - count + 1) if count else 0.0
    high = stats.beta.ppf(0.975, count + 1, total - count) if count < total else 1.0
    assert (share.low, share.high) == pytest.approx((low, high))
    assert Share.of(0, 0).high == 1.0


def test_the_bound_is_exact_and_one_sided():
    assert upper_bound(0, 59, 0.05) == pytest.approx(1 - 0.05 ** (1 / 59))
    bound = upper_bound(5, 400, 0.05)
    assert stats.binom.cdf(5, 400, bound) == pytest.approx(0.05)


def test_the_paired_difference_covers():
    """In at least 94 of 100 simulated checks of 500 problems."""
    random_numbers, covered = np.random.default_rng(3), 0
    better, worse = 0.004, 0.012
    for _ in range(2000):
        counts = random_numbers.multinomial(500, [better, worse, 1 - better - worse])
        _, low, high = paired_difference(int(counts[0]), int(counts[1]), 500)
        covered += low <= better - worse <= high
    assert covered / 2000 >= 0.94
    assert paired_difference(3, 1, 100)[0] == pytest.approx(0.02)


def test_figures_of_a_rule():
    """Four drafts by hand: two right, one of them rejected; two wrong, one of them accepted."""
    drafts = [
        draft([0.9, 0.8], right=True),
        draft([0.9, 0.4], right=True),
        draft([0.9, 0.7], first_wrong=1, right=False),
        draft([0.9, 0.2], first_wrong=1, right=False),
    ]
    costs = costs_of(drafts, plain_ms=10.0)
    assert (costs.draft, costs.verification) == (5.0, 1.0)
    rules = make_rules(drafts, (0.5,), TOKEN, 0.5, 0.05, costs)
    (row,) = next(rule for rule in rules if rule.rule == "first-reject").thresholds
    assert (row.loss.count, row.loss.total) == (1, 4)
    assert (row.false_accepts.count, row.false_accepts.total) == (1, 2)
    assert (row.false_rejects.count, row.false_rejects.total) == (1, 2)
    assert row.kept == 18 / 24
    assert row.speedup == pytest.approx(1 / (0.5 + 0.1 + 1 - 0.75))
    assert costs_of(drafts, None).speedup(0.9) is None
    assert whole_wrong_answers(drafts, "first-reject", 0.5).count == 1


def test_reliability_counts_every_judged_prefix_once():
    drafts = [draft([0.9, 0.1], first_wrong=1), draft([0.8, 0.95])]
    bins = reliability(drafts)
    assert sum(one.right.total for one in bins) == 4
    assert [one.right.count for one in bins] == [0, 1, 1, 1]
    assert [one.mean for one in bins] == [0.1, 0.8, 0.9, 0.95]
    assert reliability([draft([0.5], right=False)]) == ()  # no grader said where


def test_a_page_of_a_grader_that_cannot_say_where_a_text_goes_wrong():
    figures, certificate = calibration()
    page = render(replace(figures, bins=()), certificate, FACTS)
    assert "Whole answers" in page
    assert "What a verdict means" not in page
