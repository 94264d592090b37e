"""Calibrate's statistics, against brute force, mapie's results, and simulated repetitions."""

from __future__ import annotations

import io
import math
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from scipy import stats

from sglang_parse.calibrate.figures import (
    accepted_len,
    compare_served,
    error_len,
    errors_allowed,
    fewest_requests,
    learn_then_test,
    loosest_certified,
    make_grid,
    make_thresholds,
    separation,
)
from sglang_parse.calibrate.report import sections, summary
from sglang_parse.client.page import render_report
from sglang_parse.client.records import BenchError
from sglang_parse.client.statistics import (
    Proportion,
    Separation,
    paired_difference,
    upper_bound,
)
from sglang_parse.client.tables import publish
from sglang_parse.core.certificate import ANSWER, TOKEN
from sglang_parse.core.selection import SELECTIONS
from sglang_parse.tasks.collect import GradedDraft
from support.calibration import CONDITIONS, calibration

pytestmark = pytest.mark.unit


def draft(verdicts, *, first_wrong=None, finished=True, right=None) -> GradedDraft:
    count = len(verdicts)
    return GradedDraft(
        problem=0,
        verdicts=tuple(verdicts),
        prefix_ends=tuple(range(3, 3 * count + 1, 3)),
        num_drafted=3 * count,
        finished=finished,
        first_wrong=first_wrong,
        is_answer_right=right,
    )


# -- losses ------------------------------------------------------------------------------

verdict_lists = st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.7, 0.9, 1.0]), min_size=1, max_size=6)


@given(verdict_lists, st.data(), st.sampled_from(sorted(SELECTIONS)), st.booleans())
def test_the_losses_can_only_fall_as_the_threshold_rises(verdicts, data, selection, finished):
    """The premise of the test from the strictest threshold down."""
    wrong = data.draw(st.integers(0, len(verdicts) - 1))
    one = draft(verdicts, first_wrong=wrong, finished=finished, right=False)
    thresholds = (0.0, 0.05, 0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0, 1.5)
    lengths = [accepted_len(one, selection, threshold) for threshold in thresholds]
    for loss, end in ((TOKEN, one.prefix_ends[wrong]), (ANSWER, one.prefix_ends[-1])):
        assert error_len(one, loss) == end
        losses = [length >= end for length in lengths]
        assert all(looser >= stricter for looser, stricter in pairwise(losses))
        assert (losses[0], losses[-1]) == (True, False)


def test_a_draft_without_an_error_has_no_loss():
    for one in (draft([1.0, 1.0]), draft([1.0, 1.0], right=True), draft([1.0], right=None)):
        assert error_len(one, TOKEN) == error_len(one, ANSWER) == math.inf
    assert error_len(draft([1.0], right=False), TOKEN) == math.inf
    assert error_len(draft([1.0], first_wrong=0), ANSWER) == math.inf


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
    """8 errors of 300 are allowed at 5 %; a threshold after a failed one is not certified."""
    assert learn_then_test([0, 2, 40, 3], 300, 0.05, 0.05)[1] == [True, True, False, False]
    assert learn_then_test([60, 3], 300, 0.05, 0.05)[1] == [False, False]


@pytest.mark.parametrize(
    ("alpha", "requests", "errors", "p_values", "num_certified"),
    [
        (0.05, 300, [8, 9], [0.034066, 0.06497], 1),
        (0.02, 1000, [12, 13], [0.037605, 0.064226], 1),
        (0.01, 2000, [12, 13], [0.038308, 0.065178], 1),
        (0.05, 300, [1, 6, 12, 19], [0.000003, 0.006579, 0.261224, 0.880953], 2),
        (0.02, 1000, [2, 6, 8, 17], [0.0, 0.00023, 0.001934, 0.294723], 3),
        (0.01, 2000, [3, 9, 12, 15], [0.000003, 0.004837, 0.038308, 0.155217], 3),
        (0.1, 500, [9, 30, 41, 59], [0.0, 0.001003, 0.100114, 0.919013], 2),
    ],
)
def test_results_equal_those_of_mapie(
    alpha: float, requests: int, errors: list, p_values: list, num_certified: int
):
    """Computed by mapie 1.6: BinaryClassificationController, fixed_sequence, at delta 0.05."""
    found, certified = learn_then_test(errors, requests, alpha, 0.05)
    assert found == pytest.approx(p_values, abs=1e-6)
    assert certified == [k < num_certified for k in range(len(errors))]


def test_the_bound_holds_in_simulated_repetitions():
    """The true error rate at the certified threshold exceeds alpha in at most delta of them.

    Drafts have an error in 30 of 100, whose score is uniform: the error rate at t is
    0.3 * (1 - t), above alpha where t is below 2/3. 400 repetitions: more than 29 failures have
    probability 0.02 if each has probability 5 %.
    """
    random_numbers = np.random.default_rng(7)
    alpha, delta, grid = 0.1, 0.05, np.linspace(0.999, 0.3, 60)
    failures = certified = 0
    for _ in range(400):
        has_error = random_numbers.random(200) < 0.3
        scores = np.where(has_error, random_numbers.random(200), -1.0)
        errors = (scores >= grid[:, None]).sum(axis=1)
        passed = sum(learn_then_test(errors, 200, alpha, delta)[1])
        certified += passed > 0
        failures += passed > 0 and 0.3 * (1 - grid[passed - 1]) > alpha
    assert certified > 390
    assert 2 < failures < 30, "the bound is broken, or the thresholds far too strict"


# -- the grid ----------------------------------------------------------------------------


def test_the_grid_has_points_where_the_verdicts_are():
    """The demo pair's right verdicts lie between 0.998 and 0.9995."""
    numbers = random.Random(1)
    verdicts = [numbers.uniform(0.998, 0.9995) for _ in range(300)] + [1e-4] * 60
    grid = make_grid(verdicts, 40, [0.5])
    assert list(grid) == sorted(set(grid), reverse=True)
    assert 0.5 in grid
    assert grid[0] == pytest.approx(max(verdicts), abs=1e-6)
    assert sum(0.998 <= threshold <= 0.9995 for threshold in grid) >= 3


def test_a_grid_needs_verdicts():
    with pytest.raises(BenchError, match="--pilot"):
        make_grid([], 40, [0.5])


@pytest.mark.parametrize("verdicts", [[0.0, 1.0], [1.0] * 5, [0.0] * 5])
def test_verdicts_at_the_edge_make_a_grid(verdicts):
    grid = make_grid(verdicts, 10, [0.5, 1.5])
    assert all(0 <= threshold <= 1 for threshold in grid[1:])
    assert {0.5, 1.5} <= set(grid)  # as given: the server's


# -- figures -----------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "total"), [(0, 20), (3, 20), (20, 20)])
def test_intervals_are_those_of_clopper_and_pearson(count: int, total: int):
    found = Proportion.of(count, total)
    low = stats.beta.ppf(0.025, count, total - count + 1) if count else 0.0
    high = stats.beta.ppf(0.975, count + 1, total - count) if count < total else 1.0
    assert (found.low, found.high) == pytest.approx((low, high))
    assert Proportion.of(0, 0).high == 1.0


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


def test_figures_of_a_selection():
    """Four drafts by hand: two right, one of them rejected; two wrong, one of them accepted."""
    drafts = [
        draft([0.9, 0.8], right=True),
        draft([0.9, 0.4], right=True),
        draft([0.9, 0.7], first_wrong=1, right=False),
        draft([0.9, 0.2], first_wrong=1, right=False),
    ]
    (row,) = make_thresholds(drafts, "first-reject", (0.5,), TOKEN, (0.5, 0.05))
    assert (row.error_rate.count, row.error_rate.total) == (1, 4)
    assert (row.false_accepts.count, row.false_accepts.total) == (1, 2)
    assert (row.false_rejects.count, row.false_rejects.total) == (1, 2)
    assert (row.wrong_answers.count, row.wrong_answers.total) == (1, 4)
    assert row.accept_ratio == 18 / 24


def test_whole_answers_are_compared_in_pairs():
    """Seven right in both, one right only with PARSE, two only by the plain target."""
    found = compare_served(0.5, [1] * 8 + [0] * 2, [1] * 7 + [0] + [1] * 2, 0.05)
    assert (found.accuracy.count, found.plain_accuracy.count) == (8, 9)
    assert (found.regressions.count, found.regressions.total) == (2, 9)
    assert found.regression_bound == upper_bound(2, 10, 0.05)
    assert found.difference == pytest.approx(-0.1)


def test_the_loosest_certified_threshold_of_a_selection():
    """Errors with the scores 0.8 and 0.4 in 59 drafts: only without one can a threshold pass."""
    drafts = [draft([0.8], first_wrong=0), draft([0.4], first_wrong=0)]
    drafts += [draft([0.9])] * 57
    rows = make_thresholds(drafts, "first-reject", (0.99, 0.85, 0.5, 0.3), TOKEN, (0.05, 0.05))
    assert [row.error_rate.count for row in rows] == [0, 0, 1, 2]
    assert loosest_certified(rows) is rows[1]
    assert loosest_certified(rows[2:]) is None


# -- right and wrong drafts ------------------------------------------------------------


def test_the_area_counts_ties_half():
    found = Separation.of([0.9, 0.5], [0.5, 0.1])
    assert found.auroc == (1 + 1 + 0.5 + 1) / 4
    assert Separation.of([0.9] * 50, [0.1] * 50).low > 0.9
    assert Separation.of([0.474] * 100, [0.474] * 90).is_at_chance
    assert not Separation.of([0.474] * 5, [0.474] * 5).is_at_chance  # too few to say so
    assert Separation.of([0.1] * 50, [0.9] * 50).is_at_chance  # worse than chance is no better
    assert (Separation.of([], [0.5]).auroc, Separation.of([0.5], []).high) == (None, 1.0)


@pytest.mark.parametrize("shift", [0.0, 0.7, 2.0])
def test_the_areas_interval_covers(shift: float):
    """In at least 94 of 100 simulated calibrations of 60 drafts."""
    numbers, covered = np.random.default_rng(5), 0
    truth = stats.norm.cdf(shift / math.sqrt(2))
    for _ in range(500):
        found = Separation.of(numbers.normal(shift, 1, 40), numbers.normal(0, 1, 20))
        covered += found.low <= truth <= found.high
    assert covered / 500 >= 0.94


def test_separation_is_of_drafts_that_the_loss_grades():
    drafts = [draft([0.1, 0.9], right=True), draft([0.8, 0.2], first_wrong=1, right=False)]
    drafts.append(draft([0.7], finished=False))
    by_token, by_answer = separation(drafts, TOKEN), separation(drafts, ANSWER)
    assert (by_token.right, by_token.wrong, by_token.auroc) == (2, 1, 1.0)
    assert (by_answer.right, by_answer.wrong, by_answer.auroc) == (1, 1, 1.0)


# -- words -----------------------------------------------------------------------------


def same(right: float, wrong: float, count: int) -> list[GradedDraft]:
    """As many right as wrong drafts, with these verdicts."""
    return [draft([right, right])] * count + [draft([wrong, wrong], first_wrong=0)] * count


@pytest.mark.parametrize(
    ("drafts", "place", "words"),
    [
        (same(0.474, 0.474, 60), 0, "Right drafts get the SAME verdicts as wrong ones (AUROC 0.50"),
        (same(0.3, 0.7, 60), 0, "Right drafts get LOWER verdicts than wrong ones (AUROC 0.00"),
        (same(0.474, 0.474, 5), 2, "is open (AUROC 0.50, 95 % interval"),
        (same(0.9, 0.1, 60), 2, "Right drafts get higher verdicts than wrong ones (AUROC 1.00"),
        ([draft([0.9])] * 60, 2, "is unknown: there were 60 right and 0 wrong first drafts"),
    ],
)
def test_the_verdicts_are_said_to_know_something_or_not(drafts: list, place: int, words: str):
    said = summary(*calibration(drafts))
    assert words in said[place]
    gives_up = "The judge does not work for this model" in said[place]
    assert gives_up == ("SAME" in words or "LOWER" in words)


@pytest.mark.parametrize(
    ("served", "words"),
    [
        (0.474, "0.474 is NOT certified: 60 of 120 first drafts have their first wrong token acc"),
        (0.5, "0.5 is certified, too: 0 of 120 first drafts have their first wrong token accepted"),
    ],
)
def test_the_served_threshold_is_said_to_be_certified_or_not(served: float, words: str):
    figures, certificate = calibration(same(0.474, 0.474, 60), served)
    (said,) = (text for text in summary(figures, certificate) if "The server's threshold" in text)
    assert words in said
    accepted = "100.0 %" if served < 0.48 else "0.0 %"
    assert f"and {accepted} of the drafted tokens are accepted" in said
    page = render_report("title", sections(figures, certificate, CONDITIONS))
    assert f"{served}<span" in page


def test_what_is_certified_is_in_80_columns(tmp_path: Path):
    console = Console(file=io.StringIO(), width=80)
    publish(
        console, tmp_path / "calibration.json", {}, "title", sections(*calibration(), CONDITIONS)
    )
    lines = console.file.getvalue().splitlines()
    assert any(line.split()[:2] == ["threshold", "certified"] for line in lines)
    assert any(line.split()[:2] == ["0.5", "yes"] for line in lines)
    assert max(map(len, lines)) <= 80


def test_a_page_without_whole_answers():
    """``--served 0``."""
    figures, certificate = calibration()
    pages = [
        render_report("title", sections(one, certificate, CONDITIONS))
        for one in (figures, replace(figures, served=()))
    ]
    assert ["Whole answers" in page for page in pages] == [True, False]
