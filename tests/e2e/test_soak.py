"""300 requests of `make soak`, at once, on the demo pair."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from sglang_parse.soak import drive as soak_drive
from sglang_parse.soak import run as soak
from support.client import Client
from support.demo_pair import DEMO
from support.servers import QUESTION, Start, parse_flags, served

NUM_REQUESTS = 300
CONCURRENCY = 64


@pytest.fixture(scope="module")
def soaked(start_server: Start) -> Iterator[Client]:
    """As `make soak` starts it."""
    flags = (*QUESTION, *soak.SHORT_ROUNDS, "--max-running-requests", str(CONCURRENCY))
    yield from served(start_server, "soak", *parse_flags((DEMO / "target", DEMO / "draft"), *flags))


def test_soak(demo_plain: Client, soaked: Client):
    load = soak.make_load(NUM_REQUESTS, 0, soak.chat_renderer(DEMO / "target"))
    expected = soak_drive.plain_answers(demo_plain.url, load, CONCURRENCY, lambda: None)
    started = time.monotonic()
    outcomes = soak_drive.drive(soaked.url, load, expected, CONCURRENCY)
    report = soak.summarise(
        load, outcomes, soak_drive.leaks(soaked.url), time.monotonic() - started
    )
    assert report.is_clean, report
    # Not vacuous: every end and both ways to be served were seen.
    assert set(report.ends) == {"finished", "aborted", "disconnected"}
    assert {"parse", "plain"} <= set(report.modes)
    soaked.assert_nothing_lost()
