"""PARSE's metrics among SGLang's own, under the server's ``/metrics``.

SGLang makes its scheduler's collector from a class that can be named in ``stat_loggers``, and
calls it only on ranks that publish: labels, registry, multi-process files and ranks are its own.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

from sglang.srt.observability.metrics_collector import (
    STAT_LOGGER_ROLE_SCHEDULER,
    SchedulerMetricsCollector,
    SchedulerStats,
)

from sglang_parse.context import process_context
from sglang_parse.core.config import ConfigError
from sglang_parse.core.counters import Totals, Window
from sglang_parse.telemetry.metrics import METRICS, PREFIX, Metric

PUBLISH_EVERY_S = 0.1
"""Nobody looks more often, and a small model's steps are shorter. Where a request has ended, what
it added is shown at once: its client may look."""

BY_NAME = {metric.name: metric for metric in METRICS}


class ParseMetrics:
    """Adds PARSE's metrics to a class derived from ``SchedulerMetricsCollector``."""

    labels: Mapping[str, Any]
    _counter_cls: Any
    _gauge_cls: Any
    _histogram_cls: Any

    def __init__(self, labels: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(labels, *args, **kwargs)  # type: ignore[call-arg]
        self._parse_counters = process_context().counters
        self._parse_window = Window(self._parse_counters)
        self._parse_published: Totals = defaultdict(float)
        self._parse_published_at = -math.inf
        self._parse_metrics = {metric.name: self._make(metric) for metric in METRICS}
        self._parse_gauges: dict[tuple[str, str], Any] = {}
        self._parse_children: dict[tuple[str, str], Any] = {}

    def _make(self, metric: Metric) -> Any:
        # As SGLang does: prometheus_client looks for PROMETHEUS_MULTIPROC_DIR when imported.
        from prometheus_client import Counter, Gauge, Histogram

        labels = [*self.labels, *([metric.label] if metric.label else [])]
        if metric.buckets:
            make = partial(self._histogram_cls or Histogram, buckets=metric.buckets)
        elif metric.is_gauge:
            make = partial(self._gauge_cls or Gauge, multiprocess_mode="mostrecent")
        else:
            make = partial(self._counter_cls or Counter)
        return make(name=PREFIX + metric.name, documentation=metric.text, labelnames=labels)

    def _child(self, metric: Metric, label_value: str) -> Any:
        """Kept once it is made: ``labels`` takes long for what every iteration asks for."""
        key = metric.name, label_value
        if key not in self._parse_children:
            own = {metric.label: label_value} if metric.label else {}
            child = self._parse_metrics[metric.name].labels(**self.labels, **own)
            self._parse_children[key] = child
        return self._parse_children[key]

    def increment_realtime_tokens(self, *args: Any, **kwargs: Any) -> None:
        """SGLang's call after every iteration, when its result has been processed."""
        super().increment_realtime_tokens(*args, **kwargs)  # type: ignore[misc]
        counters, now = self._parse_counters, time.monotonic()
        if not counters.collects_samples:
            # The first call: it comes after a prefill, so no sample is missing yet.
            counters.collects_samples = True
            self._show_zeros()
        counters.update_latest()
        if now - self._parse_published_at >= PUBLISH_EVERY_S or counters.any_finished:
            self._parse_published_at = now
            self.publish()

    def publish(self) -> None:
        """Bring Prometheus up to date with the counters."""
        counters = self._parse_counters
        for (name, label_value), total in counters.totals.items():
            growth = total - self._parse_published[name, label_value]
            if growth > 0:
                self._child(BY_NAME[name], label_value).inc(growth)
                self._parse_published[name, label_value] = total
        planned = counters.last_plan
        gauges = {
            ("expected_speedup", ""): counters.expected_speedup,
            ("planned_draft_tokens", ""): planned and planned.draft_tokens,
            ("planned_prefixes", ""): planned and planned.max_prefixes,
            ("planned_draft_chunk", ""): planned and planned.draft_chunk,
            ("simulated_acceptance", ""): counters.simulated_accept_ratio,
            ("verdict_drift", ""): counters.verdict_drift,
            **{("certificate_mismatch", what): 1 for what in counters.certificate_mismatch},
        }
        for (name, label_value), value in gauges.items():
            if value is not None and value != self._parse_gauges.get((name, label_value)):
                self._parse_gauges[name, label_value] = value
                self._child(BY_NAME[name], label_value).set(value)
        for name, values in counters.drain_samples().items():
            child = self._child(BY_NAME[name], "")
            for value in values:
                child.observe(value)

    def _show_zeros(self) -> None:
        for metric in METRICS:
            for label_value in () if metric.is_gauge else metric.label_values:
                self._child(metric, label_value)

    def log_stats(self, stats: SchedulerStats) -> None:
        """SGLang's two acceptance gauges count iterations; PARSE's rounds are what is meant."""
        growth = self._parse_window.advance()
        accepted, rounds = growth["accepted_tokens_total", "*"], growth["rounds_total", "*"]
        if rounds:
            stats.spec_accept_length = accepted / rounds
            stats.spec_accept_rate = accepted / max(1, growth["verified_tokens_total", "*"])
        super().log_stats(stats)  # type: ignore[misc]


class ParseMetricsCollector(ParseMetrics, SchedulerMetricsCollector):
    """SGLang's scheduler metrics and PARSE's."""


def with_parse_metrics(stat_loggers: Mapping[str, type] | None) -> dict[str, type]:
    """``ServerArgs.stat_loggers`` with PARSE's collector.

    Raises:
        ConfigError: it names a scheduler collector without ``ParseMetrics``.
    """
    loggers = dict(stat_loggers or {})
    theirs = loggers.setdefault(STAT_LOGGER_ROLE_SCHEDULER, ParseMetricsCollector)
    if not issubclass(theirs, ParseMetrics):
        raise ConfigError(
            f"PARSE: stat_loggers[{STAT_LOGGER_ROLE_SCHEDULER!r}] is {theirs.__name__}, which "
            "lacks PARSE's metrics. Fix: derive it from "
            f"{ParseMetrics.__module__}.{ParseMetrics.__name__} too, named first"
        )
    return loggers
