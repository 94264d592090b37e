"""PARSE's collector takes SGLang's place for it, and the decode line is the one SGLang writes."""

import inspect
import logging
import pickle

import pytest

from sglang_parse.core.config import ConfigError
from sglang_parse.core.tally import Tally

pytestmark = pytest.mark.seams

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


def test_it_survives_the_way_to_the_scheduler_process():
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


def test_the_decode_line_has_the_part_that_is_replaced():
    from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter

    source = inspect.getsource(SchedulerMetricsReporter.report_decode_stats)
    assert "accept len: {spec_accept_length:.2f}, accept rate: {spec_accept_rate:.2f}, " in source


@pytest.mark.parametrize("serves", [True, False])
def test_lines_change_only_where_parse_serves(serves: bool):
    from sglang_parse.patches.parse.decode_log import DecodeLine

    class Waiting:
        """A request that has not reached the worker."""

        def finished(self) -> bool:
            return True

    tally = Tally()
    tally.latest = [Waiting()] if serves else []
    tally.count("drafted_tokens_total", 20)
    tally.count("draft_forwards_total", 5)
    tally.count("judged_tokens_total", 16)
    tally.count("accepted_tokens_total", 12)
    text = "Decode batch, #running-req: 1, accept len: 0.50, accept rate: 0.01, #queue-req: 0"
    record = logging.LogRecord("", logging.INFO, "", 0, text, (), None)
    assert DecodeLine(tally).filter(record)
    expected = (
        "Decode batch, #running-req: 1, rounds: 0, drafted: 20, judged: 16, accepted: 12 (0.75), "
        "target-written: 0, #drafting: 0, #verifying: 0, #continuing: 0, #plain: 0, "
        "tokens a draft forward: 4.0, #queue-req: 0"
    )
    assert record.getMessage() == (expected if serves else text)


def test_simulated_acceptance_is_in_the_decode_line():
    from sglang_parse.patches.parse.decode_log import DecodeLine

    tally = Tally()
    assert "SIMULATED" not in DecodeLine(tally).figures()
    tally.simulated = 0.75
    assert "SIMULATED acceptance: 0.75, " in DecodeLine(tally).figures()
