"""PARSE's metrics under the server's ``/metrics``.

SGLang creates its scheduler's metrics collector from the class in ``stat_loggers`` and calls it
only on ranks that publish; labels, registry and multi-process files are SGLang's.
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
from sglang_parse.core.counters import Growth, Totals
from sglang_parse.core.setting import ConfigError
from sglang_parse.telemetry.metrics import METRICS, PREFIX, Metric

PUBLISH_EVERY_S = 0.1
"""A small model's iterations are shorter. An iteration that ends a request publishes at once."""

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
        self._parse_window = Growth(self._parse_counters)
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
        """Caches children: ``labels`` is slow for every iteration."""
        key = metric.name, label_value
        if key not in self._parse_children:
            labels = {**self.labels, **({metric.label: label_value} if metric.label else {})}
            child = self._parse_metrics[metric.name].labels(**labels)
            self._parse_children[key] = child
        return self._parse_children[key]

    def increment_realtime_tokens(self, *args: Any, **kwargs: Any) -> None:
        """Publishes; SGLang calls this after it has processed an iteration's result."""
        super().increment_realtime_tokens(*args, **kwargs)  # type: ignore[misc]
        counters, now = self._parse_counters, time.monotonic()
        if not counters.collects_samples:
            # The first call follows a prefill, so no sample is missing. Children show as zeros.
            counters.collects_samples = True
            for metric in METRICS:
                for label_value in () if metric.is_gauge else metric.label_values:
                    self._child(metric, label_value)
        counters.update_latest()
        any_finished = any(req.finished() for req in counters.latest_reqs)
        if now - self._parse_published_at >= PUBLISH_EVERY_S or any_finished:
            self._parse_published_at = now
            self.publish()

    def publish(self) -> None:
        """Updates the Prometheus metrics from the counters."""
        counters = self._parse_counters
        for (name, label_value), total in counters.totals.items():
            growth = total - self._parse_published[name, label_value]
            if growth > 0:
                self._child(BY_NAME[name], label_value).inc(growth)
                self._parse_published[name, label_value] = total
        planned = counters.last_plan
        gauges = {
            ("drafting_speedup", ""): counters.drafting_speedup,
            ("planned_draft_tokens", ""): planned and planned.draft_tokens,
            ("planned_prefixes", ""): planned and planned.max_prefixes,
            ("planned_draft_chunk", ""): planned and planned.draft_chunk,
            ("simulated_acceptance", ""): counters.simulated_accept_ratio,
            ("verdict_drift", ""): counters.verdict_drift,
            ("judge", counters.judge or ""): 1 if counters.judge else None,
            **{("graph_speedup", kind): ratio for kind, ratio in counters.graphs.items()},
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

    def log_stats(self, stats: SchedulerStats) -> None:
        """Sets SGLang's acceptance gauges by PARSE's rounds; SGLang counts iterations.

        As in SGLang, the accept length is the output of one verify, the bonus token included.
        """
        growth = self._parse_window.advance()
        rounds, verified, accepted, matched = (
            growth[f"{name}_total", "*"]
            for name in ("rounds", "verified_tokens", "accepted_tokens", "matched_tokens")
        )
        if rounds:
            stats.spec_accept_length = (accepted + matched) / rounds + 1
            stats.spec_accept_rate = accepted / max(1, verified)
        super().log_stats(stats)  # type: ignore[misc]


class ParseMetricsCollector(ParseMetrics, SchedulerMetricsCollector):
    """SGLang's scheduler metrics with PARSE's."""


def with_parse_metrics(stat_loggers: Mapping[str, type] | None) -> dict[str, type]:
    """Adds PARSE's collector to ``ServerArgs.stat_loggers``.

    Raises:
        ConfigError: there is a scheduler collector without ``ParseMetrics``.
    """
    loggers = dict(stat_loggers or {})
    collector = loggers.setdefault(STAT_LOGGER_ROLE_SCHEDULER, ParseMetricsCollector)
    if not issubclass(collector, ParseMetrics):
        raise ConfigError(
            f"PARSE: stat_loggers[{STAT_LOGGER_ROLE_SCHEDULER!r}] is {collector.__name__}, which "
            "lacks PARSE's metrics. Fix: derive it from "
            f"{ParseMetrics.__module__}.{ParseMetrics.__name__} too, named first"
        )
    return loggers
