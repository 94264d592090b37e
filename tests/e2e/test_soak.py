"""A small `make soak`: 200 requests, 64 at once, on the demo pair."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from soak.drive import drive, leaks_of, plain_answers
from soak.run import SHORT_ROUNDS, make_load, summarise
from support.client import Client
from support.demo_pair import DEMO
from support.servers import QUESTION, Start, parse_flags, served

pytestmark = pytest.mark.nightly("tests/unit/test_soak_load.py")

NUM_REQUESTS = 200
SEED = 11
"""Its 200 requests have more kinds of prompts and options than others' 300."""
CONCURRENCY = 64


@pytest.fixture(scope="module")
def soaked(start_server: Start) -> Iterator[Client]:
    """The PARSE server as `make soak` starts it."""
    flags = (*QUESTION, *SHORT_ROUNDS, "--max-running-requests", str(CONCURRENCY))
    yield from served(start_server, "soak", *parse_flags((DEMO / "target", DEMO / "draft"), *flags))


def test_soak(demo_plain: Client, soaked: Client):
    load = make_load(NUM_REQUESTS, SEED, DEMO / "target")
    expected = plain_answers(demo_plain.url, load, CONCURRENCY, lambda: None)
    started = time.monotonic()
    outcomes = drive(soaked.url, load, expected, CONCURRENCY)
    seconds = time.monotonic() - started
    report = summarise(load, outcomes, leaks_of(soaked.url), seconds)
    assert report.is_clean, report
    # Not vacuous: every end, PARSE and its fallback occurred.
    assert set(report.ends) == {"finished", "aborted", "disconnected"}
    assert {"parse", "plain"} <= set(report.modes)
    soaked.assert_nothing_lost()
