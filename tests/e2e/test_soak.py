"""300 requests of `make soak`, at once, on the demo pair."""

from __future__ import annotations

import time

from client import Client
from conftest import DEMO

from sglang_parse.bench import soak

NUM_REQUESTS = 300
CONCURRENCY = 64


def test_soak(demo_plain: Client, demo: Client):
    load = soak.make_load(NUM_REQUESTS, 0, soak.chat_renderer(DEMO / "target"))
    expected = soak.plain_answers(demo_plain.url, load, CONCURRENCY, lambda: None)
    started = time.monotonic()
    outcomes = soak.drive(demo.url, load, expected, CONCURRENCY)
    report = soak.summarise(load, outcomes, soak.leaks(demo.url), time.monotonic() - started)
    assert report.is_clean, report
    # Not vacuous: every end and both ways to be served were seen.
    assert set(report.ends) == {"finished", "aborted", "disconnected"}
    assert {"parse", "plain"} <= set(report.modes)
    demo.assert_nothing_lost()
