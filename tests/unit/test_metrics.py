"""The counters of ``/metrics`` and of the decode log line."""

from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from weakref import ref

import pytest

from sglang_parse.core.counters import Counters, Growth, request_counts
from sglang_parse.core.phases import Phase, RequestPolicy, Stats
from sglang_parse.core.request import RequestState
from sglang_parse.core.request_telemetry import MAX_TRACE_BYTES
from sglang_parse.core.round import Verdicts
from sglang_parse.telemetry.metrics import METRICS, response_info
from support.rounds import round_of

pytestmark = pytest.mark.unit


@dataclass
class Request:
    """The fields of SGLang's ``Req`` that counters use."""

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
        """Outputs accepted draft tokens, then tokens of the target."""
        self.output_ids += [7] * (accepted + target)
        self.parse_state.write([7] * (accepted + target))
        self.parse_state.notes.telemetry.stats.accepted_tokens += accepted
        self.parse_state.notes.telemetry.num_target_run = target


def request(plain_reason: str = "") -> Request:
    return Request(RequestState(RequestPolicy(threshold=0.5, plain_reason=plain_reason)))


def counted(counters: Counters) -> dict[str, float]:
    """Returns totals other than 0, as name or name/label value."""
    return {
        f"{name}/{value}" if value else name: total
        for (name, value), total in counters.totals.items()
        if total
    }


def test_repeated_updates_count_growth_once():
    counters, req = Counters(), request()
    stats = req.parse_state.notes.telemetry.stats
    stats.prefill_ms, stats.drafted_tokens = 5.0, 8
    req.emit(0, 1)
    counters.update(req)
    counters.update(req)
    stats.rounds, stats.draft_ms = 1, 20.0
    req.emit(6, 1)
    counters.update(req)
    assert counted(counters) == pytest.approx(
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
        (1, None, 6, 2),  # still running
        (1, 8, 6, 2),  # ends with its last token
        (1, 7, 6, 1),  # a stop removes the target's token
        (1, 4, 3, 1),  # and draft tokens
        (0, 4, 3, 1),  # no target token after the draft
        (3, 8, 6, 2),  # a stop removes one of several target tokens
    ],
)
def test_tokens_after_a_stop_are_not_counted(target, finished_len, accepted_seen, target_seen):
    counters, req = Counters(), request()
    req.emit(0, 1)
    counters.update(req)
    req.emit(6, target)
    req.finished_len = finished_len
    if finished_len is None:
        req.output_ids = req.output_ids[: 7 + target]
    counters.update(req)
    totals = counted(counters)
    assert totals["accepted_tokens_total"] == accepted_seen
    assert totals["target_tokens_total/parse"] == target_seen
    info = response_info(req)
    assert (info["accepted_tokens"], info["target_tokens"]) == (accepted_seen, target_seen)


def test_plain_requests_are_counted_by_reason():
    counters = Counters()
    for reason in ("grammar", "switched off", "grammar"):
        req = request(reason)
        req.emit(0, 3)
        counters.update(req)
    assert counted(counters) == {
        "plain_requests_total/grammar": 2,
        "plain_requests_total/switched off": 1,
        "target_tokens_total/plain": 9,
    }


def test_a_fault_is_counted_once():
    counters, req = Counters(), request()
    req.parse_state.fault = "NaN in the target model's logits"
    counters.update(req)
    counters.update(req)
    assert counted(counters) == {"requests_total": 1, "faults_total": 1}


def test_requests_that_never_started_are_not_counted():
    counters, req = Counters(), Request(parse_state=None)
    counters.record_launch([req], overlap=False)
    counters.update_latest()
    assert counted(counters) == {}
    assert response_info(req) == {"mode": "plain", "reason": "not started"}


def test_a_trace_that_was_cut_says_so():
    req = request()
    req.parse_state.policy = RequestPolicy(threshold=0.5, keep_trace=True)
    assert response_info(req).keys() >= {"trace", "fingerprint"}
    assert "trace_truncated" not in response_info(req)
    req.parse_state.notes.telemetry.trace_bytes = MAX_TRACE_BYTES
    assert response_info(req)["trace_truncated"]


def test_a_response_without_a_draft_has_a_reason():
    req = request()
    assert response_info(req)["reason"] == "the request ended before its first draft"
    req.parse_state.skip_draft("drafting suspended: speedup 0.63, below 1")
    reason = response_info(req)["reason"]
    assert reason == "drafting suspended: speedup 0.63, below 1"
    req.parse_state.notes.telemetry.stats.drafted_tokens = 3
    assert "reason" not in response_info(req)


def test_simulated_acceptance_is_in_every_response():
    unstarted = Request(parse_state=None)
    for req in (request(), request("grammar"), unstarted):
        assert response_info(req, simulated=0.75)["simulated"] == 0.75


VERIFIED = ((8, 8, [0.9, 0.8]), (4, 1, [0.6, 0.1, 0.7]), (0, 0, []))
"""Verified and accepted tokens of drafts, and their verdicts."""


def test_verified_drafts():
    counters = Counters()
    counters.collects_samples = True
    for num_verified, accepted_len, verdicts in VERIFIED:
        one = round_of(num_verified, num_verified, accepted_len)
        counters.count_round(replace(one, verdicts=Verdicts(verdicts)))
    assert counted(counters) == {"verified_tokens_total": 12}
    assert counters.drain_samples() == {
        "accept_ratio": [1.0, 0.25, 0.0],
        "verdict": [0.9, 0.8, 0.6, 0.1, 0.7],
    }
    assert counters.drain_samples() == {}


def test_samples_are_only_collected_on_request():
    counters = Counters()
    counters.count_round(round_of(8, 8, 8))
    counters.sample_kv_slots([Request(None)])
    assert counters.drain_samples() == {}


def test_kv_slots_after_committed_tokens_are_sampled():
    counters = Counters()
    counters.collects_samples = True
    slots = [(10, 12), (20, 36)]
    reqs = []
    for low, high in slots:
        req = request()
        req.parse_state.committed = low
        req.kv = SimpleNamespace(kv_allocated_len=high)
        reqs.append(req)
    counters.sample_kv_slots(reqs)
    counters.sample_kv_slots(reqs[:1])
    assert counters.drain_samples() == {"kv_slots_held": [18, 2]}


def test_itl_is_sampled_for_decoding_requests():
    """Between outputs with only decode steps in between."""
    counters = Counters()
    counters.collects_samples = True
    state = request().parse_state
    state.phase = Phase.DECODING
    for now in (1.0, 1.5, 2.5):  # the verify pass's tokens, and two decode steps
        counters.sample_itl(state, now)
    state.phase = Phase.DRAFTING  # its next token starts a draft
    counters.sample_itl(state, 3.0)
    state.phase = Phase.DECODING
    counters.sample_itl(state, 9.0)
    state.restart(12, [])
    counters.sample_itl(state, 20.0)
    assert counters.drain_samples() == {"decode_itl_seconds": [0.5, 1.0, 0.5]}


def test_running_requests_by_phase():
    counters = Counters()
    reqs = [request() for _ in range(4)]
    reqs[1].parse_state.phase = reqs[2].parse_state.phase = Phase.DECODING
    reqs[2].finished_len = 0
    counters.record_launch(reqs, overlap=False)
    assert counters.count_phases() == {"drafting": 2, "verifying": 0, "decoding": 1, "plain": 0}


def test_with_overlap_the_previous_iteration_is_updated_too():
    counters = Counters()
    a, b, c = (request() for _ in range(3))
    for overlap in (False, True):
        counters.record_launch([a, b], overlap=overlap)
        counters.record_launch([b, c], overlap=overlap)
        assert [*map(id, counters.latest_reqs)] == [id(b), id(c), *[id(a)] * overlap]


def test_an_idle_server_keeps_no_request():
    """SGLang drops them; their prompts and answers must not stay in memory."""
    counters, reqs = Counters(), [request(), request()]
    counters.record_launch(reqs[:1], overlap=True)
    counters.record_launch(reqs[1:], overlap=True)
    dropped = [*map(ref, reqs)]
    assert (len(counters.latest_reqs), counters.count_phases()["drafting"]) == (2, 1)
    reqs.clear()
    assert [each() for each in dropped] == [None, None]
    assert counters.latest_reqs == []
    counters.update_latest()
    assert counters.count_phases()["drafting"] == 0


def test_a_window_returns_growth_since_the_last_call():
    counters = Counters()
    window = Growth(counters)
    counters.count("target_tokens_total", 5, "parse")
    counters.count("target_tokens_total", 2, "plain")
    growth = window.advance()
    assert growth["target_tokens_total", "parse"] == 5
    assert growth["target_tokens_total", "*"] == 7
    counters.count("target_tokens_total", 1, "plain")
    growth = window.advance()
    assert growth["target_tokens_total", "parse"] == 0
    assert growth["target_tokens_total", "*"] == 1
    assert window.advance()["rounds_total", "*"] == 0


def test_every_count_of_a_request_has_a_metric():
    req = request()
    for number, stat in enumerate(fields(Stats), 1):
        setattr(req.parse_state.notes.telemetry.stats, stat.name, number)
    req.output_ids = req.parse_state.output_ids = [7] * 50
    req.parse_state.fault = "some"
    counters = Counters()
    counters.update(req)
    assert len(counted(counters)) == len(request_counts(req)) + len(("requests", "faults"))
    known = {(metric.name, value) for metric in METRICS for value in metric.label_values}
    assert set(counters.totals) <= known


def test_metric_names_and_labels():
    for metric in METRICS:
        assert (bool(metric.buckets) or metric.is_gauge) != metric.name.endswith("_total")
        assert bool(metric.label) == (metric.label_values != ("",))
        assert list(metric.buckets) == sorted(set(metric.buckets))
