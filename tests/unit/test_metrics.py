"""The accounting behind ``/metrics`` and the decode log line: requests to totals, each once."""

from dataclasses import dataclass, field, fields
from types import SimpleNamespace

import pytest

from sglang_parse.core.phases import Phase, Terms
from sglang_parse.core.request import RequestState, Stats
from sglang_parse.core.tally import Tally, Window, figures
from sglang_parse.telemetry.metrics import METRICS, response_info

pytestmark = pytest.mark.unit


@dataclass
class Request:
    """As much of SGLang's ``Req`` as the accounting looks at."""

    parse_state: RequestState | None
    output_ids: list[int] = field(default_factory=list)
    finished_len: int | None = None
    kv: SimpleNamespace | None = None

    @property
    def output_ids_through_stop(self) -> list[int]:
        return self.output_ids[: self.finished_len]

    def finished(self) -> bool:
        return self.finished_len is not None

    def emit(self, accepted: int, target: int) -> None:
        """One iteration's result: accepted draft tokens, then the target's own."""
        self.output_ids += [7] * (accepted + target)
        self.parse_state.write([7] * (accepted + target))
        self.parse_state.stats.accepted_tokens += accepted
        self.parse_state.target_run = target


def request(plain_reason: str = "") -> Request:
    return Request(RequestState(Terms(threshold=0.5, plain_reason=plain_reason)))


def counted(tally: Tally) -> dict[str, float]:
    """Totals that are not 0, a label's value behind a slash."""
    return {
        f"{name}/{value}" if value else name: total
        for (name, value), total in tally.totals.items()
        if total
    }


def test_growth_is_counted_once_however_often_a_request_is_settled():
    tally, req = Tally(), request()
    stats = req.parse_state.stats
    stats.prefill_ms, stats.drafted_tokens = 5.0, 8
    req.emit(0, 1)
    tally.update(req)
    tally.update(req)
    stats.rounds, stats.draft_ms = 1, 20.0
    req.emit(6, 1)
    tally.update(req)
    assert counted(tally) == pytest.approx(
        {
            "requests_total": 1,
            "drafted_tokens_total": 8,
            "accepted_tokens_total": 6,
            "target_tokens_total/parse": 2,
            "rounds_total": 1,
            "stage_seconds_total/prefill": 0.005,
            "stage_seconds_total/draft": 0.02,
        }
    )


@pytest.mark.parametrize(
    ("target", "finished_len", "accepted_seen", "target_seen"),
    [
        (1, None, 6, 2),  # goes on
        (1, 8, 6, 2),  # ends with its last token
        (1, 7, 6, 1),  # a stop cuts the target's token off
        (1, 4, 3, 1),  # and draft tokens
        (0, 4, 3, 1),  # no target token behind the draft
        (3, 8, 6, 2),  # a run of the target's own is cut
    ],
)
def test_tokens_behind_a_stop_are_nobodys(target, finished_len, accepted_seen, target_seen):
    tally, req = Tally(), request()
    req.emit(0, 1)
    tally.update(req)
    req.emit(6, target)
    req.finished_len = finished_len
    if finished_len is None:
        req.output_ids = req.output_ids[: 7 + target]
    tally.update(req)
    totals = counted(tally)
    assert totals["accepted_tokens_total"] == accepted_seen
    assert totals["target_tokens_total/parse"] == target_seen
    info = response_info(req)
    assert (info["accepted_tokens"], info["target_tokens"]) == (accepted_seen, target_seen)


def test_plain_requests_are_counted_by_reason():
    tally = Tally()
    for reason in ("grammar", "switched off", "grammar"):
        req = request(reason)
        req.emit(0, 3)
        tally.update(req)
    assert counted(tally) == {
        "plain_requests_total/grammar": 2,
        "plain_requests_total/switched off": 1,
        "target_tokens_total/plain": 9,
    }


def test_a_fault_is_counted_once():
    tally, req = Tally(), request()
    req.parse_state.fault = "NaN in the target model's logits"
    tally.update(req)
    tally.update(req)
    assert counted(tally) == {"requests_total": 1, "faults_total": 1}


def test_requests_that_never_started_are_not_counted():
    tally, req = Tally(), Request(parse_state=None)
    tally.latest = [req]
    tally.update_latest()
    assert counted(tally) == {}
    assert response_info(req) == {"mode": "plain", "reason": "not started"}


def test_simulated_acceptance_is_in_every_response():
    unstarted = Request(parse_state=None)
    for req in (request(), request("grammar"), unstarted):
        assert response_info(req, simulated=0.75)["simulated"] == 0.75


def test_judged_drafts():
    tally = Tally()
    tally.keeps_samples = True
    tally.judged(8, 8, [0.9, 0.8])
    tally.judged(4, 1, [0.6, 0.1, 0.7])
    tally.judged(0, 0, [])
    assert counted(tally) == {"judged_tokens_total": 12}
    assert tally.take_samples() == {
        "cut_fraction": [1.0, 0.25, 0.0],
        "verdict": [0.9, 0.8, 0.6, 0.1, 0.7],
    }
    assert tally.take_samples() == {}


def test_nothing_piles_up_where_nobody_takes_samples():
    tally = Tally()
    tally.judged(8, 8, [0.9, 0.8])
    tally.hold([Request(None)])  # its slots are not even looked at
    assert tally.take_samples() == {}


def test_held_slots_are_those_behind_the_committed_tokens():
    tally = Tally()
    tally.keeps_samples = True
    slots = [(10, 12), (20, 36)]
    reqs = []
    for low, high in slots:
        req = request()
        req.parse_state.committed = low
        req.kv = SimpleNamespace(kv_allocated_len=high)
        reqs.append(req)
    tally.hold(reqs)
    tally.hold(reqs[:1])
    assert tally.take_samples() == {"kv_slots_held": [18, 2]}


def test_gaps_are_those_of_requests_that_continue():
    """From tokens to tokens with nothing but target steps between; a draft is no gap of theirs."""
    tally = Tally()
    tally.keeps_samples = True
    state = request().parse_state
    state.phase = Phase.CONTINUING
    for now in (1.0, 1.5, 2.5):  # the first tokens behind a cut, and two steps
        tally.emitted(state, now)
    state.phase = Phase.DRAFTING  # with its next token it begins a draft
    tally.emitted(state, 3.0)
    state.phase = Phase.CONTINUING
    tally.emitted(state, 9.0)
    state.restart(12, [])
    tally.emitted(state, 20.0)
    assert tally.take_samples() == {"continuing_gap_seconds": [0.5, 1.0, 0.5]}


def test_phases_of_the_requests_that_go_on():
    tally = Tally()
    reqs = [request() for _ in range(4)]
    reqs[1].parse_state.phase = reqs[2].parse_state.phase = Phase.CONTINUING
    reqs[2].finished_len = 0
    tally.launched(reqs, overlap=False)
    assert tally.phases() == {"drafting": 2, "verifying": 0, "continuing": 1, "plain": 0}


def test_under_overlap_a_result_comes_after_the_next_launch():
    tally = Tally()
    first, second = ([SimpleNamespace(rid=rid) for rid in rids] for rids in ("ab", "bc"))
    for overlap in (False, True):
        tally.launched(first, overlap=overlap)
        tally.launched(second, overlap=overlap)
        rids = {req.rid for req in tally.latest}
        assert rids == ({"a", "b", "c"} if overlap else {"b", "c"})


def test_a_window_shows_what_was_added_since_the_last_look():
    tally = Tally()
    window = Window(tally)
    tally.count("target_tokens_total", 5, "parse")
    tally.count("target_tokens_total", 2, "plain")
    growth = window.advance()
    assert growth["target_tokens_total", "parse"] == 5
    assert growth["target_tokens_total", "*"] == 7
    tally.count("target_tokens_total", 1, "plain")
    growth = window.advance()
    assert growth["target_tokens_total", "parse"] == 0
    assert growth["target_tokens_total", "*"] == 1
    assert window.advance()["rounds_total", "*"] == 0


def test_every_figure_of_a_request_has_its_metric():
    req = request()
    for number, stat in enumerate(fields(Stats), 1):
        setattr(req.parse_state.stats, stat.name, number)
    req.output_ids = req.parse_state.output_ids = [7] * 50
    req.parse_state.fault = "some"
    tally = Tally()
    tally.update(req)
    assert len(counted(tally)) == len(figures(req)) + len(("requests", "faults"))
    known = {(metric.name, value) for metric in METRICS for value in metric.label_values}
    assert set(tally.totals) <= known


def test_names_are_prometheus_names():
    for metric in METRICS:
        assert (bool(metric.buckets) or metric.is_gauge) != metric.name.endswith("_total")
        assert bool(metric.label) == (metric.label_values != ("",))
        assert list(metric.buckets) == sorted(set(metric.buckets))
