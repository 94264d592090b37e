"""The comparison's statistics, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from sglang_parse.client.figures import speedups
from sglang_parse.client.records import BenchError, BenchRun, Variant
from sglang_parse.compare.figures import (
    accept_length,
    make_comparison,
    make_goals,
)
from sglang_parse.compare.page import render
from sglang_parse.compare.quality import paired_test
from support.comparison import FACTS, RATES, SHARES, answer, six_servers, timed


def test_speedups_are_quotients_of_the_same_run():
    parse, plain = Variant("parse", 0.5), Variant("plain")
    rates = [(parse, 0, 200.0), (plain, 0, 100.0), (parse, 1, 60.0), (plain, 1, 20.0)]
    loads = [timed(way, run, 1, rate) for way, run, rate in rates]
    assert speedups(loads, parse, plain) == [2.0, 3.0]
    # A run in which one of the two is missing has no quotient.
    assert speedups(loads[:3], parse, plain) == [2.0]


def test_medians_and_ranges():
    figures = six_servers()
    parse = figures.find(Variant("parse", 0.5))
    speed = parse.speed_at(1)
    assert speed.tokens_per_s.median == pytest.approx(252.5)
    assert (speed.tokens_per_s.low, speed.tokens_per_s.high) == pytest.approx((250, 255))
    assert speed.over["plain"].median == pytest.approx(250 / 80)
    assert parse.time.ms_per_request["decode"] == pytest.approx(200)
    assert parse.time.draft_share == pytest.approx(0.6)
    assert len(figures.find(Variant("parse", 1.5)).speeds) == 1


def test_figures_to_reach():
    goals = {goal.name.partition(" (")[0]: goal for goal in six_servers().checks}
    standalone = goals["PARSE over STANDALONE"]
    assert standalone.reached
    assert standalone.value == pytest.approx(250 / 130)
    none = goals["PARSE+EAGLE3 over its better part, 0% accepted"]
    # 147 against EAGLE3's 160, PARSE alone has 60: 8 % are missing.
    assert not none.reached
    assert none.missed_by == pytest.approx(1 - 147 / 160)
    middle = goals["the same nearest the middle, 60% accepted: faster than both"]
    assert middle.reached
    assert middle.value == pytest.approx(280 / 250)


def test_what_blocks_are_worth_at_several_requests():
    blocks, one = Variant("parse", 0.5), Variant("parse-one", 0.5)
    rates = [(1, 9.0), (8, 1.8), (16, 1.2)]
    loads = [timed(blocks, 0, c, 100 * ratio) for c, ratio in rates]
    loads += [timed(one, 0, c, 100.0) for c, _ in rates]
    goals = make_goals((), loads, 0.5)
    assert [(round(goal.value, 2), goal.reached) for goal in goals] == [(1.8, True), (1.2, False)]
    assert "at 16 requests" in goals[1].name


def test_what_was_not_measured_has_no_figure_to_reach():
    figures = six_servers()
    loads = [timed(Variant("parse", 0.5), 0, 1, 250.0), timed(Variant("plain"), 0, 1, 80.0)]
    assert make_goals(figures.ways, loads, 0.5) == ()


def test_other_models_have_no_figures_to_reach():
    """Those are what this project wants of the demo pair."""
    assert "Figures to reach" in render(six_servers(), FACTS)
    others = six_servers(has_goals=False)
    assert (others.checks, others.as_json()["checks"]) == ((), [])
    assert "Figures to reach" not in render(others, FACTS)
    assert others.ways == six_servers().ways


def test_mcnemar_is_the_binomial_test_of_the_problems_that_differ():
    ours, theirs = [1.0] * 10 + [0.0] * 2, [0.0] * 8 + [1.0] * 4
    test = paired_test(ours, theirs)
    assert (test.method, test.better, test.worse) == ("McNemar, exact", 8, 2)
    # Two-sided: 2 * (1 + 10 + 45) / 2**10.
    assert test.p_value == pytest.approx(112 / 1024)


def test_equal_scores_have_p_one_and_none_are_left_out():
    assert paired_test([1.0, 0.0], [1.0, 0.0]).p_value == 1
    test = paired_test([1.0, None, 0.0], [1.0, 1.0, 1.0])
    assert (test.problems, test.worse) == (2, 1)
    assert paired_test([None], [1.0]) is None


def test_ratings_are_compared_by_wilcoxon():
    ours = [0.9, 0.8, 0.7, 0.85, 0.95, 0.75]
    test = paired_test(ours, [score - 0.1 - 0.01 * k for k, score in enumerate(ours)])
    assert (test.method, test.better, test.worse) == ("Wilcoxon", 6, 0)
    assert test.p_value == pytest.approx(2 / 2**6)


def test_a_paired_test_of_different_problems_is_an_error():
    with pytest.raises(BenchError, match="3 scores with 2"):
        paired_test([1.0] * 3, [1.0] * 2)


def test_accept_length_leaves_out_the_token_of_the_prefill():
    assert accept_length([answer(0, None, 81), answer(1, None, 41)]) == pytest.approx(120 / 40)


def test_parse_has_its_own_accept_length():
    """SGLang counts every iteration of PARSE as a verification; there were two passes each."""
    assert accept_length([answer(0, 0.5, 80), answer(1, 0.25, 80)]) == pytest.approx(60 / 4)


def test_quality_and_noise():
    figures = six_servers()
    draft = figures.find(Variant("draft")).quality
    assert draft.score == 0.75
    assert draft.interval[0] < 0.75 < draft.interval[1]
    assert (draft.test.better, draft.test.worse) == (0, 10)
    assert draft.test.p_value == pytest.approx(2 / 2**10)
    assert figures.find(Variant("plain")).quality.test is None
    assert (figures.noise.problems, figures.noise.p_value) == (40, 1)
    assert len(figures.ways) == len(RATES)


def ungraded(way: Variant) -> BenchRun:
    return BenchRun(way, 0, 16, 1.0, (answer(0, SHARES.get(way.threshold)),) * 2)


@pytest.mark.parametrize("ways", [(), (Variant("plain"),), (Variant("parse", 0.5),)])
def test_a_page_of_few_servers_and_no_grades(ways: tuple[Variant, ...]):
    """MT-Bench without a judge, one server alone, none that finished."""
    loads = [timed(way, 0, 1, 80.0) for way in ways]
    looks = [BenchRun(way, 0, 1, 1.0, (answer(0, 0.6),)) for way in ways if way.threshold]
    graded = [ungraded(way) for way in ways]
    figures = make_comparison(ways, loads, looks, graded, 0.5, has_goals=True)
    assert all(way.quality.score is None for way in figures.ways)
    assert (figures.noise, figures.checks) == (None, ())
    page = render(figures, FACTS)
    assert page.count("not graded") == len(ways)
    assert ("No server with PARSE took part" in page) == (Variant("parse", 0.5) not in ways)
