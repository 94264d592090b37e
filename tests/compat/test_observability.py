"""PARSE's metrics collector in SGLang, and its figures in SGLang's decode log line."""

import inspect
import logging
import pickle
from types import SimpleNamespace

import pytest

from sglang_parse.core.counters import Counters
from sglang_parse.core.setting import ConfigError

pytestmark = pytest.mark.compat

ROLE = "scheduler"


def test_the_collector_is_named_in_stat_loggers():
    from sglang.srt.observability.metrics_collector import (
        STAT_LOGGER_ROLE_SCHEDULER,
        SchedulerMetricsCollector,
    )

    from sglang_parse.telemetry.prometheus import with_parse_metrics

    assert STAT_LOGGER_ROLE_SCHEDULER == ROLE
    for given in (None, {}, {"tokenizer": dict}):
        loggers = with_parse_metrics(given)
        assert issubclass(loggers.pop(ROLE), SchedulerMetricsCollector)
        assert loggers == (given or {})


def test_it_can_be_pickled_to_the_scheduler_process():
    from sglang_parse.telemetry.prometheus import with_parse_metrics

    loggers = with_parse_metrics(None)
    assert pickle.loads(pickle.dumps(loggers)) == loggers


def test_another_collector_is_refused_unless_it_has_parses_metrics():
    from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector

    from sglang_parse.telemetry.prometheus import ParseMetrics, with_parse_metrics

    class Theirs(SchedulerMetricsCollector):
        pass

    class Both(ParseMetrics, Theirs):
        pass

    with pytest.raises(ConfigError, match=r"Theirs.*Fix: .*ParseMetrics"):
        with_parse_metrics({ROLE: Theirs})
    assert with_parse_metrics({ROLE: Both}) == {ROLE: Both}


class Child:
    """A counter or gauge in place of Prometheus's."""

    def __init__(self, **_: object) -> None:
        self.value = 0.0

    def labels(self, **_: object) -> "Child":
        return self

    def inc(self, amount: float) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        self.value = value

    observe = set


class Finished:
    """A request that has ended."""

    def finished(self) -> bool:
        return True


def test_a_finished_request_is_published_at_once(monkeypatch: pytest.MonkeyPatch):
    """Everything else is published ten times per second."""
    from sglang_parse.telemetry import prometheus

    class Theirs:
        _counter_cls = _gauge_cls = _histogram_cls = Child

        def __init__(self, labels: dict) -> None:
            self.labels = labels

        def increment_realtime_tokens(self) -> None:
            pass

    class Both(prometheus.ParseMetrics, Theirs):
        pass

    counters, clock = Counters(), [100.0]
    monkeypatch.setattr(prometheus, "process_context", lambda: SimpleNamespace(counters=counters))
    monkeypatch.setattr(prometheus.time, "monotonic", lambda: clock[0])
    collector = Both({})
    ended = Finished()
    shown = []
    for now, latest in ((100, []), (100.05, []), (100.06, [ended]), (100.1, []), (100.17, [])):
        clock[0] = now
        counters.record_launch(latest, overlap=False)
        counters.count("rounds_total")
        collector.increment_realtime_tokens()
        shown.append(collector._parse_children["rounds_total", ""].value)
    assert shown == [1, 1, 3, 3, 5]


def test_sglangs_decode_line_has_the_replaced_part():
    from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter

    source = inspect.getsource(SchedulerMetricsReporter.report_decode_stats)
    assert "accept len: {spec_accept_length:.2f}, accept rate: {spec_accept_rate:.2f}, " in source


@pytest.mark.parametrize("serves", [True, False])
def test_lines_change_only_in_processes_that_serve_parse(serves: bool):
    from sglang_parse.patches.parse.decode_log import DecodeLine

    counters, waiting = Counters(), Finished()  # it has not reached the worker
    counters.record_launch([waiting] if serves else [], overlap=False)
    counters.count("drafted_tokens_total", 20)
    counters.count("draft_forwards_total", 5)
    counters.count("verified_tokens_total", 16)
    counters.count("accepted_tokens_total", 12)
    text = "Decode batch, #running-req: 1, accept len: 0.50, accept rate: 0.01, #queue-req: 0"
    record = logging.LogRecord("", logging.INFO, "", 0, text, (), None)
    assert DecodeLine(counters).filter(record)
    expected = (
        "Decode batch, #running-req: 1, rounds: 0, drafted: 20, verified: 16, accepted: 12 (0.75), "
        "target tokens: 0, #drafting: 0, #verifying: 0, #decoding: 0, #plain: 0, "
        "tokens per draft forward: 4.0, #queue-req: 0"
    )
    assert record.getMessage() == (expected if serves else text)


def test_simulated_acceptance_is_in_the_decode_line():
    from sglang_parse.patches.parse.decode_log import DecodeLine

    counters = Counters()
    assert "SIMULATED" not in DecodeLine(counters).figures()
    counters.simulated_accept_ratio = 0.75
    assert "SIMULATED acceptance: 0.75, " in DecodeLine(counters).figures()
