"""Runs of ``bench_serving``, with a stand-in program in its place."""

from __future__ import annotations

import contextlib
import json
import multiprocessing.forkserver
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_parse.cli import end_on_sigterm
from sglang_parse.client.ask import Asking
from sglang_parse.client.records import BenchError, Item, Variant
from sglang_parse.client.servers import Remote
from sglang_parse.compare import serving
from sglang_parse.compare.serving import Load, bench

ITEMS = [Item("0", "one", None), Item("1", "two", None, request={"regex": "[0-9]+"})]
LOAD = Load(Variant("parse", 0.9), 0, 2, ITEMS, [256, 99], "models/target", Asking())
STAND_IN = """
import json, os, sys, time
from pathlib import Path
here = Path(__file__).parent
(here / "seen.json").write_text(json.dumps([os.getpid(), *sys.argv]))
print("said by bench_serving")
{program}
"""
ANSWER = 'Path(sys.argv[sys.argv.index("--output-file") + 1]).write_text({result!r})'
RESULT = {
    "errors": ["", ""],
    "completed": 2,
    "output_lens": [11, 19],
    "ttfts": [0.1, 0.1],
    "itls": [[0.2, 0.3], [0.4]],
    "duration": 1.5,
    "accept_length": None,
    "generated_texts": ["first", "second"],
}


class Alive(Remote):
    def check_alive(self) -> None:
        """It is."""


@pytest.fixture(autouse=True)
def _fork_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One without SGLang; the next one that is needed in this process imports it again."""
    multiprocessing.forkserver._forkserver._stop()
    monkeypatch.setattr(serving, "PRELOADED", ())
    monkeypatch.setattr(serving, "server_totals", lambda _: {})
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
    return bench(Alive("parse", "http://127.0.0.1:1"), LOAD, folder)


def test_what_is_sent_and_what_comes_back(folder: Path, capfd: pytest.CaptureFixture):
    stand_in(folder, ANSWER.format(result=json.dumps(RESULT) + "\n"))
    (timed,), answers = run_bench(folder)
    assert [(one.problem, one.text, one.output_tokens) for one in answers] == [
        *((0, "first", 11), (1, "second", 19)),
    ]
    assert (timed.tokens_per_s, timed.output_tokens, timed.requests) == (20, 30, 2)
    assert timed.latency_ms["ttft"] == pytest.approx({"p50": 100, "p90": 100, "p99": 100})
    # Time between chunks, whatever a chunk holds; its longest of a request; to the last chunk.
    medians = {kind: values["p50"] for kind, values in timed.latency_ms.items()}
    assert medians == pytest.approx(
        {"ttft": 100, "tpot": (50 + 400 / 18) / 2, "itl": 300, "max_itl": 350, "e2e": 550}
    )
    pid, _, *arguments = seen(folder)
    requests = Path(value(arguments, "--dataset-path")).read_text().splitlines()
    assert [json.loads(line)["messages"][0]["content"] for line in requests] == ["one", "two"]
    assert [json.loads(line)["max_tokens"] for line in requests] == [256, 99]
    assert [json.loads(line).get("regex") for line in requests] == [None, "[0-9]+"]
    assert {json.loads(line)["custom_params"]["parse"]["threshold"] for line in requests} == {0.9}
    assert value(arguments, "--max-concurrency") == "2"
    assert value(arguments, "--num-prompts") == "2"
    # A process of its own: what it says is in its log only.
    assert pid != os.getpid()
    assert capfd.readouterr().out == ""
    assert "said by bench_serving" in (folder / "parse-at0.9-run0-c2.log").read_text()


def test_half_of_the_requests_switch_parse_off(folder: Path):
    """Every second one; either half has its own figures."""
    load = replace(LOAD, variant=Variant("parse", off_fraction=0.5))
    stand_in(folder, ANSWER.format(result=json.dumps(RESULT) + "\n"))
    (drafting, off), _ = bench(Alive("parse", "http://127.0.0.1:1"), load, folder)
    assert (drafting.variant.group, off.variant.group) == ("drafting", "off")
    assert (drafting.output_tokens, off.output_tokens) == (11, 19)
    assert (drafting.tokens_per_s, off.tokens_per_s) == pytest.approx((11 / 1.5, 19 / 1.5))
    assert off.latency_ms["itl"]["p99"] == pytest.approx(400)
    lines = (folder / "parse-off0.5-run0-c2.requests.jsonl").read_text().splitlines()
    custom = [json.loads(line).get("custom_params") for line in lines]
    assert custom == [None, {"parse": {"enabled": False}}]
    all_off = replace(LOAD, variant=Variant("parse", off_fraction=1.0))
    assert [all_off.is_off(index) for index in range(4)] == [True] * 4
    assert list(all_off.groups()) == [all_off.variant]


def test_stages_are_fractions_of_the_runs_duration(folder: Path, monkeypatch: pytest.MonkeyPatch):
    draft, verify = ((serving.STAGE_SECONDS, stage) for stage in ("draft", "verify"))
    passes, rows = (serving.PASSES, ""), (serving.ROWS, "")
    before = {draft: 1.0, passes: 1, rows: 100}
    totals = iter([before, {draft: 1.3, verify: 0.6, passes: 13, rows: 700}])
    monkeypatch.setattr(serving, "server_totals", lambda _: next(totals))
    stand_in(folder, ANSWER.format(result=json.dumps(RESULT) + "\n"))
    (timed,), _ = run_bench(folder)
    assert timed.stages == pytest.approx({"draft": 0.2, "verify": 0.4})
    assert (timed.rows_per_pass, timed.ms_per_pass) == pytest.approx((50, 50))


def test_a_failed_request_is_an_error(folder: Path):
    failed = RESULT | {"errors": ["", "boom"], "completed": 1}
    stand_in(folder, ANSWER.format(result=json.dumps(failed) + "\n"))
    with pytest.raises(BenchError, match="1 of 2 requests to parse failed .*boom"):
        run_bench(folder)


def test_its_failure_is_an_error(folder: Path):
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
def test_sigterm_ends_it_too(folder: Path):
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
