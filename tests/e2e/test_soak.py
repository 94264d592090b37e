"""A small `make soak`: 300 requests, 64 at once, on the demo pair."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Iterator

import pytest

from sglang_parse.client.servers import free_ports
from sglang_parse.core.phases import ANSWERS, ENDPOINT, MODEL, PREDICTION
from soak.drive import drive, leaks_of, plain_answers
from soak.endpoint import dying_endpoint
from soak.run import make_load, soak_settings, summarise
from support.client import Client
from support.demo_pair import DEMO
from support.one_chain import held_out_problems
from support.pages import ROOT
from support.servers import QUESTION, Start, parse_flags, served
from support.warm import Nursery

pytestmark = pytest.mark.nightly("tests/unit/test_soak_load.py")

NUM_REQUESTS = 300
SEED = 12
CONCURRENCY = 64
(PORT,) = free_ports(1)
"""Of the server that drafts."""
SOURCES = {MODEL, PREDICTION, ANSWERS, ENDPOINT}


@pytest.fixture(scope="module")
def soaked(start_server: Start) -> Iterator[Client]:
    """The PARSE server as `make soak` starts it."""
    flags = (*QUESTION, *soak_settings(PORT), "--max-running-requests", str(CONCURRENCY))
    yield from served(start_server, "soak", *parse_flags((DEMO / "target", DEMO / "draft"), *flags))


def test_soak(demo_plain: Client, soaked: Client):
    problems = held_out_problems(400, seed=SEED)
    ends, modes, drafted = set[str](), set[str](), set[str]()
    for seed in (SEED, SEED + 1, SEED + 2):  # on a busy machine the other server may be late
        load = make_load(NUM_REQUESTS, problems, seed, DEMO / "target")
        expected = plain_answers(demo_plain.url, load, CONCURRENCY, lambda: None)
        with dying_endpoint(PORT, problems):
            started = time.monotonic()
            outcomes = drive(soaked.url, load, expected, CONCURRENCY)
            seconds = time.monotonic() - started
        report = summarise(load, outcomes, leaks_of(soaked.url), seconds)
        assert report.is_clean, report
        ends |= {*report.ends}
        modes |= {*report.modes}
        drafted |= {source for source, count in report.drafted.items() if count}
        if drafted >= SOURCES:
            break
    # Not vacuous: every end, PARSE and its fallback, and drafts of every source occurred. Forced
    # text is a draft only while the model's do not pay: test_predictions.py has it.
    assert ends == {"finished", "aborted", "disconnected", "hung up", "refused"}
    assert {"parse", "plain"} <= modes
    assert drafted >= SOURCES
    soaked.assert_nothing_lost()


def test_make_soak_starts(nursery: Nursery, monkeypatch: pytest.MonkeyPatch):
    """The program of the Makefile's line, with its path."""
    command = ["make", "-n", "--no-print-directory", "-o", ".venv/.sglang-parse-installed"]
    line = subprocess.check_output([*command, "soak", "SOAK_FLAGS=--help"], cwd=ROOT, text=True)
    path, python, *words = shlex.split(line)
    assert (path.partition("=")[0], python) == ("PYTHONPATH", ".venv/bin/python")
    monkeypatch.setenv(*path.split("="))
    assert "usage: make soak" in nursery.run(*words)
