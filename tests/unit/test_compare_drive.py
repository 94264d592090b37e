"""The road to ``bench_serving`` and back, without running it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from sglang_parse.bench.compare.drive import TOLD_TO_END, Load, bench
from sglang_parse.bench.compare.pool import Remote
from sglang_parse.bench.compare.records import CompareError, Way
from sglang_parse.bench.demo.load import Asking
from sglang_parse.bench.tasks import Item

LOAD = Load([Item("0", "one", None), Item("1", "two", None)], 2, "models/target", Asking(), 7)
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


def stand_in(monkeypatch: pytest.MonkeyPatch, run) -> None:
    """``run(arguments)`` is what ``bench_serving`` does."""
    module = ModuleType("sglang.benchmark.serving")
    module.cli_main = lambda: run(sys.argv)
    package = ModuleType("sglang.benchmark")
    package.serving = module
    monkeypatch.setitem(sys.modules, "sglang.benchmark", package)
    monkeypatch.setitem(sys.modules, "sglang.benchmark.serving", module)


def value(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def run_bench(folder: Path):
    way = Way("parse", 0.9)
    return bench(Alive("parse", "http://127.0.0.1:1"), way, 0, LOAD, folder)


def test_what_is_sent_and_what_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[list[str]] = []

    def run(arguments: list[str]) -> None:
        seen.append(arguments)
        Path(value(arguments, "--output-file")).write_text(json.dumps(RESULT) + "\n")

    stand_in(monkeypatch, run)
    before = sys.argv
    timed = run_bench(tmp_path)
    assert sys.argv is before
    assert timed.tokens_per_s == 20
    assert timed.latency_ms["ttft"] == {"p50": 0, "p90": 1, "p99": 2}
    assert timed.latency_ms["e2e"] == {"p50": 30, "p90": 31, "p99": 32}
    requests = Path(value(seen[0], "--dataset-path")).read_text().splitlines()
    assert [json.loads(line)["messages"][0]["content"] for line in requests] == ["one", "two"]
    assert value(seen[0], "--max-concurrency") == "2"
    assert value(seen[0], "--num-prompts") == "2"


def test_a_failed_request_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run(arguments: list[str]) -> None:
        failed = RESULT | {"errors": ["", "boom"], "completed": 1}
        Path(value(arguments, "--output-file")).write_text(json.dumps(failed) + "\n")

    stand_in(monkeypatch, run)
    with pytest.raises(CompareError, match="1 of 2 requests to parse failed .*boom"):
        run_bench(tmp_path)


def test_its_failure_is_ours_but_an_order_to_end_is_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stand_in(monkeypatch, lambda arguments: sys.exit(1))  # noqa: ARG005
    with pytest.raises(CompareError, match=r"bench_serving against parse failed"):
        run_bench(tmp_path)
    stand_in(monkeypatch, lambda arguments: sys.exit(TOLD_TO_END))  # noqa: ARG005
    with pytest.raises(SystemExit):
        run_bench(tmp_path)
