"""What a server's stages took, as it publishes it under ``/metrics``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import httpx
from prometheus_client.parser import text_string_to_metric_families

from sglang_parse.client.records import BenchError
from sglang_parse.client.servers import Endpoint
from sglang_parse.telemetry.metrics import METRICS, PREFIX

_METRIC = next(metric for metric in METRICS if metric.name == "stage_seconds_total")


@contextlib.contextmanager
def stage_shares(endpoint: Endpoint) -> Iterator[dict[str, float]]:
    """Stage -> its share of the time in the block, all requests together; filled at the block's
    end, and empty where the server publishes none of PARSE's metrics.

    Raises:
        BenchError: the server does not answer.
    """
    shares: dict[str, float] = {}
    before, started = _stage_seconds(endpoint), time.perf_counter()
    yield shares
    seconds = time.perf_counter() - started
    after = _stage_seconds(endpoint)
    # Not there before: a server shows its counters from its first request on.
    shares.update({stage: (after[stage] - before.get(stage, 0.0)) / seconds for stage in after})


def _stage_seconds(endpoint: Endpoint) -> dict[str, float]:
    """Stage -> seconds since the server began; empty where it does not say."""
    try:
        response = httpx.get(f"{endpoint.url}/metrics", timeout=60)
    except httpx.HTTPError as error:
        raise BenchError(f"{endpoint.name} does not show its metrics: {error!r}") from error
    if response.status_code != httpx.codes.OK:
        return {}
    return {
        sample.labels[_METRIC.label]: sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if sample.name == PREFIX + _METRIC.name
    }
