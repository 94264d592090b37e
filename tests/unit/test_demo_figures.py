"""The demo's statistics, against cases small enough to compute by hand."""

import pytest

from sglang_parse.client.records import Answer, BenchError, BenchRun, Variant
from sglang_parse.demo.figures import make_figures, run_limit

pytestmark = pytest.mark.unit

COUNTERS = {
    "mode": "parse",
    "rounds": 2,
    "drafted_tokens": 100,
    "accepted_tokens": 75,
    "matched_tokens": 5,
    "target_tokens": 24,
    "draft_ms": 200.0,
    "verify_ms": 100.0,
    "decode_ms": 150.0,
    "prefill_ms": 20.0,
}


def answer(problem: int, *, right: bool = True, parse: bool = False) -> Answer:
    meta = {"parse": [COUNTERS]} if parse else {}
    return Answer(problem, ("text",), 100, 1000.0, meta, float(right))


def leg(server: str, run: int, concurrency: int, seconds: float, *, right: int = 2) -> BenchRun:
    """Two answers of 100 tokens; `right` of them are right."""
    answers = [answer(i, right=i < right, parse=server == "parse") for i in range(2)]
    return BenchRun(Variant(server), run, concurrency, seconds, tuple(answers))


def legs(parse_seconds: tuple[float, ...] = (1.0, 0.8, 5.0)) -> list[BenchRun]:
    """Three runs; the plain target takes 2 s one at a time and 1 s at 8; PARSE as given."""
    found = []
    for run, seconds in enumerate(parse_seconds):
        found += [leg("plain", run, 1, 2.0), leg("plain", run, 8, 1.0)]
        found += [leg("parse", run, 1, seconds), leg("parse", run, 8, 0.8)]
        found += [leg("draft", run, 1, 0.4, right=1), leg("draft", run, 8, 0.2, right=1)]
    return found


def test_limit_of_one_run_by_hand():
    limit = run_limit(leg("parse", 0, 1, 1.0), leg("plain", 0, 1, 2.0))
    # t = 2 s / 200 tokens; per token 2 ms of drafting, 1 ms of verification, 80 % the draft's.
    assert limit.plain_ms_per_token == pytest.approx(10.0)
    assert (limit.r, limit.v, limit.a) == pytest.approx((0.2, 0.1, 0.8))
    assert limit.limit == pytest.approx(2.0)
    assert limit.share_reached == pytest.approx(1.0)


def test_medians_are_over_runs_and_ratios_within_a_run():
    figures = make_figures(legs(), 8)
    parse = figures.servers["parse"]
    assert parse.one.tokens_per_s == pytest.approx(200.0)
    assert parse.one.ratio == pytest.approx(2.0)
    assert parse.concurrent.ratio == pytest.approx(1.25)
    assert figures.servers["draft"].one.ratio == pytest.approx(5.0)
    assert figures.servers["plain"].one.ratio == 1.0
    assert figures.servers["draft"].stages_one is None


def test_stage_figures_are_per_request():
    stages = make_figures(legs(), 8).servers["parse"].stages_one
    assert stages.draft_share == pytest.approx(0.75)
    assert stages.accepted_of_drafted == pytest.approx(0.75)
    assert stages.passes_per_request == 2
    assert stages.ms_per_request == {
        "prefill": 20.0,
        "draft": 200.0,
        "verify": 100.0,
        "decode": 150.0,
    }


def test_accuracy_counts_every_answer_also_untimed_ones():
    untimed = [leg(name, -1, 8, 1.0, right=0) for name in ("plain", "draft", "parse")]
    figures = make_figures([*legs(), *untimed], 8)
    assert figures.servers["plain"].accuracy == pytest.approx(12 / 14)
    assert figures.servers["plain"].problems == 14
    assert figures.servers["plain"].concurrent.tokens_per_s == pytest.approx(200.0)


def test_checks_say_what_was_reached():
    reached = {check.name: check.reached for check in make_figures(legs((0.4, 0.3, 5.0)), 8).checks}
    assert list(reached.values()) == [True, True, True, True, True]
    slow = {check.name: check.reached for check in make_figures(legs((9.0, 9.0, 9.0)), 8).checks}
    assert not slow["speedup at 1 request"]
    assert slow["accuracy lost against the target"]


def test_json_is_plain_data():
    content = make_figures(legs((0.4, 0.3, 5.0)), 8).as_json()
    assert sorted(content) == ["checks", "limit", "servers"]
    assert content["servers"]["parse"]["stages_one"]["ms_per_request"]["draft"] == 200.0
    assert content["checks"][0]["reached"] is True


def test_a_missing_leg_or_counter_is_an_error_that_names_it():
    without = [
        found for found in legs() if (found.variant.server, found.concurrency) != ("draft", 8)
    ]
    with pytest.raises(BenchError, match="draft at 8"):
        make_figures(without, 8)
    broken = BenchRun(
        Variant("parse"), 0, 1, 1.0, (Answer(0, ("",), 10, 1.0, {"parse": [{"mode": "parse"}]}),)
    )
    with pytest.raises(BenchError, match="draft_ms"):
        run_limit(broken, leg("plain", 0, 1, 2.0))
