"""The road to ``bench_serving`` and back; a program that stands in for it runs where it would."""

from __future__ import annotations

import contextlib
import json
import multiprocessing.forkserver
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_parse.cli import end_on_sigterm
from sglang_parse.client.ask import Asking
from sglang_parse.client.records import BenchError, Variant
from sglang_parse.client.servers import Remote
from sglang_parse.compare import serving
from sglang_parse.compare.serving import Load, bench
from sglang_parse.tasks import Item

LOAD = Load([Item("0", "one", None), Item("1", "two", None)], 2, "models/target", Asking(), 7)
STAND_IN = """
import json, os, sys, time
from pathlib import Path
here = Path(__file__).parent
(here / "seen.json").write_text(json.dumps([os.getpid(), *sys.argv]))
print("said by bench_serving")
{program}
"""
ANSWER = 'Path(sys.argv[sys.argv.index("--output-file") + 1]).write_text({result!r})'
TIMES = {
    f"{name}_{kind}_ms": place + 10 * scale
    for place, name in enumerate(("median", "p90", "p99"))
    for scale, kind in enumerate(("ttft", "tpot", "itl", "e2e_latency"))
}
RESULT = TIMES | {
    "errors": ["", ""],
    "completed": 2,
    "total_output_tokens": 30,
    "duration": 1.5,
    "output_throughput": 20.0,
    "request_throughput": 1.3,
    "accept_length": None,
}


class Alive(Remote):
    def check_alive(self) -> None:
        """It is."""


@pytest.fixture(autouse=True)
def _fork_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One without SGLang; the next one that is needed in this process imports it again."""
    multiprocessing.forkserver._forkserver._stop()
    monkeypatch.setattr(serving, "PRELOADED", ())
    yield
    multiprocessing.forkserver._forkserver._stop()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-in is, and what it leaves."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(serving, "PROGRAM", "serving_stand_in")
    return tmp_path


def stand_in(folder: Path, program: str) -> None:
    """``program`` is what ``bench_serving`` does."""
    (folder / "serving_stand_in.py").write_text(STAND_IN.format(program=program))


def seen(folder: Path) -> list:
    """The stand-in's process, name and arguments."""
    return json.loads((folder / "seen.json").read_text())


def value(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def run_bench(folder: Path):
    way = Variant("parse", 0.9)
    return bench(Alive("parse", "http://127.0.0.1:1"), way, 0, LOAD, folder)


def test_what_is_sent_and_what_comes_back(folder: Path, capfd: pytest.CaptureFixture):
    stand_in(folder, ANSWER.format(result=json.dumps(RESULT) + "\n"))
    timed = run_bench(folder)
    assert timed.tokens_per_s == 20
    assert timed.latency_ms["ttft"] == {"p50": 0, "p90": 1, "p99": 2}
    assert timed.latency_ms["e2e"] == {"p50": 30, "p90": 31, "p99": 32}
    pid, _, *arguments = seen(folder)
    requests = Path(value(arguments, "--dataset-path")).read_text().splitlines()
    assert [json.loads(line)["messages"][0]["content"] for line in requests] == ["one", "two"]
    assert value(arguments, "--max-concurrency") == "2"
    assert value(arguments, "--num-prompts") == "2"
    # A process of its own: what it says is in its log only.
    assert pid != os.getpid()
    assert capfd.readouterr().out == ""
    assert "said by bench_serving" in (folder / "parse-at0.9-run0-c2.log").read_text()


def test_a_failed_request_is_an_error(folder: Path):
    failed = RESULT | {"errors": ["", "boom"], "completed": 1}
    stand_in(folder, ANSWER.format(result=json.dumps(failed) + "\n"))
    with pytest.raises(BenchError, match="1 of 2 requests to parse failed .*boom"):
        run_bench(folder)


def test_its_failure_is_ours(folder: Path):
    stand_in(folder, "sys.exit(1)")
    with pytest.raises(BenchError, match=r"bench_serving against parse failed: exit code 1"):
        run_bench(folder)


@pytest.fixture
def _ends_on_sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    end_on_sigterm()
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_ends_on_sigterm")
def test_an_order_to_end_is_obeyed_and_passed_on(folder: Path):
    stand_in(folder, "time.sleep(60)")

    def tell_us_to_end() -> None:
        while not (folder / "seen.json").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=tell_us_to_end, daemon=True).start()
    with pytest.raises(SystemExit):
        run_bench(folder)
    deadline = time.monotonic() + 10
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(seen(folder)[0], 0)
            time.sleep(0.05)
        pytest.fail("bench_serving still runs")
