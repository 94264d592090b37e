"""The speed benchmark: refused settings, its servers, and its figures by hand."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from goals import goals_of
from rich.console import Console

from sglang_parse.client.records import Answer, BenchError, BenchRun, Variant
from sglang_parse.client.servers import ServerSpec
from sglang_parse.core.config import ParseConfig
from sglang_parse.core.simulation import ENV_VAR as SIMULATE
from sglang_parse.limit.figures import LimitFigures, VerifyTime, speed_at
from sglang_parse.limit.run import _Measuring
from sglang_parse.limit.run import run as run_bench
from sglang_parse.limit.settings import LimitSettings, add_arguments

pytest.importorskip("transformers")
pytestmark = pytest.mark.unit

TINY = ("--device", "cpu", "--target", "tiny_target", "--draft", "tiny_draft")


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def settings(*words: str) -> LimitSettings:
    return LimitSettings.read(parsed(*words))


@pytest.fixture(autouse=True)
def _no_tokenizer(monkeypatch: pytest.MonkeyPatch):
    """Its length needs a tokenizer; here it is fixed."""
    monkeypatch.setattr(LimitSettings, "question_len", 40)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--target", "qwen3_7b"), "'qwen3_7b' is no shape; use qwen3_1_7b, qwen3_235b"),
        (("--draft", "tiny_draft"), "--draft tiny_draft has 1024 words, --target .*151936"),
        (("--output-len", "500"), "--output-len is 500, which --prefixes 16 does not divide"),
        (("--output-len", "16384"), "--output-len or --prefixes: .*16384; use a whole number"),
        (("--prefixes", "512"), "--output-len or --prefixes: --parse-max-prefixes is 512"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(words: tuple[str, ...], message: str):
    with pytest.raises(BenchError, match=message):
        settings(*words)


@pytest.mark.parametrize("words", [("--acceptance", "1.5"), ("--concurrency", "0,1")])
def test_settings_out_of_range_are_refused(words: tuple[str, ...], capsys):
    with pytest.raises(SystemExit):
        parsed(*words)
    assert "; use " in capsys.readouterr().err


def test_the_defaults_fit_a_card_of_141_gb_and_no_small_one():
    defaults = settings()
    assert defaults.bytes_needed > 64 * 2**30
    defaults.check_memory(141 * 10**9)
    with pytest.raises(BenchError, match="qwen3_32b and qwen3_1_7b need about .*; use smaller"):
        defaults.check_memory(80 * 10**9)


def test_rows_of_a_draft_that_is_an_answer():
    assert (settings().num_draft_rows, settings().num_rows) == (513, 513 + 16 * 40)


def simulated(words: tuple[str, ...], tmp_path: Path) -> dict[str, str | None]:
    specs = settings(*TINY, *words, "--output", str(tmp_path)).specs()
    return {spec.name: dict(spec.environment).get(SIMULATE) for spec in specs}


def test_servers_and_their_simulated_acceptance(tmp_path: Path):
    plain = {"plain": None, "draft": None}
    fractions = {"parse@0.25": "0.25", "parse@1": "1"}
    words = ("--acceptance", "1,0.25")
    assert simulated(words, tmp_path) == plain | {"parse-always": "1"} | fractions
    # Where all servers always draft, none of its own measures the stage costs.
    assert simulated((*words, "--drafting", "always"), tmp_path) == plain | fractions


def bench_run(server: str, run: int, seconds: float, **parse: float) -> BenchRun:
    """Two requests at a time with 50 output tokens each."""
    answer = Answer(0, "", 50, 4000.0, {"parse": [parse]} if parse else {})
    return BenchRun(Variant(server), run, 2, seconds, (answer,) * 2)


def bench_runs() -> list[BenchRun]:
    """Plain 10 tokens/s, draft 50, PARSE 20; a verify pass of 500 ms per request."""
    counters = {"rounds": 1, "accepted_tokens": 25, "drafted_tokens": 50, "draft_ms": 500}
    counters |= {"prefill_ms": 50, "decode_ms": 2500}
    found = []
    for run, late in enumerate((0, 5, 1)):  # the median run is late by 1 s
        found += [bench_run("plain", run, 9 + late), bench_run("draft", run, 1 + late)]
        found.append(bench_run("parse-always", run, 9, **counters, verify_ms=500))
        found.append(bench_run("parse@0.5", run, 4 + late, **counters, verify_ms=700))
    return found


def test_a_row_of_the_table_by_hand():
    row = speed_at(bench_runs(), 0.5, 2, settings(*TINY))
    rates = (row.plain_tokens_per_s, row.draft_tokens_per_s, row.tokens_per_s)
    assert rates == (10, 50, 20)
    # 10 ms of verification per output token, while the plain target takes 100.
    assert (row.r, row.v, row.limit) == pytest.approx((0.2, 0.1, 1 / 0.8))
    assert (row.speedup, row.limit_fraction) == pytest.approx((2, 1.6))
    assert (row.accepted, row.drafted) == (0.5, 1)
    stages = {"prefill": 50, "draft": 500, "verify": 700, "decode": 2500}
    assert row.ms_per_request == stages


def test_a_missing_measurement_is_an_error():
    with pytest.raises(BenchError, match=r"nothing was measured of parse@0.75 at 2 requests"):
        speed_at(bench_runs(), 0.75, 2, settings(*TINY))


def test_what_was_measured_is_written_when_a_server_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Acceptance 1 is measured before 0.25, whose server does not start."""

    def serve(measuring: _Measuring, spec: ServerSpec) -> None:
        if spec.name == "parse@0.25":
            raise BenchError("out of time")
        name = {"parse@1": "parse@0.5"}.get(spec.name, spec.name)
        found = [one for one in bench_runs() if one.variant.server == name]
        measuring.runs += [replace(one, variant=Variant(spec.name)) for one in found]
        settings = measuring.settings
        measuring.prefill_ms |= {settings.num_draft_rows: 10.0, settings.num_rows: 12.0}

    monkeypatch.setattr(_Measuring, "serve", serve)
    words = (*TINY, "--acceptance", "0.25,1", "--concurrency", "2", "--output", str(tmp_path))
    with pytest.raises(BenchError, match="out of time"):
        run_bench(parsed(*words), Console(quiet=True))
    (row,) = json.loads((tmp_path / "results.json").read_text())["speeds"]
    assert (row["acceptance"], row["concurrency"], row["speedup"]) == (1, 2, 2)
    assert (tmp_path / "bench.html").is_file()


def test_goals():
    row = replace(speed_at(bench_runs(), 0.5, 2, settings(*TINY)), concurrency=8)
    speeds = tuple(
        replace(row, acceptance=a, speedup=2.4, limit_fraction=0.96) for a in (0, 0.5, 1)
    )
    one = VerifyTime(1153, 512, 16, 40, 1, ms=14, prefill_ms=10, prefill_rows_ms=12)
    figures = asdict(LimitFigures(speeds, one))
    found = {goal.name: goal.is_reached for goal in goals_of(figures)}
    assert found == {
        "acceptance 0, 8 at a time: speedup": True,
        "acceptance 0, 8 at a time: fraction of the limit": True,
        "acceptance 0.5, 8 at a time: fraction of the limit": True,
        "acceptance 1, 8 at a time: speedup": False,
        "acceptance 1, 8 at a time: fraction of the limit": True,
        "verify pass / prefill of as many rows": False,
    }


def test_the_fastest_plain_server_counts(tmp_path: Path):
    asked = settings("--baselines", "flashinfer,fa3", "--output", str(tmp_path))
    backends = {
        spec.name: spec.common[spec.common.index("--attention-backend") + 1]
        for spec in asked.specs()
    }
    assert (backends["plain"], backends["plain-fa3"]) == ("flashinfer", "fa3")
    assert set(backends.values()) == {"flashinfer", "fa3"}
    measured = [*bench_runs(), *(bench_run("plain-fa3", run, 5) for run in range(3))]
    row = speed_at(measured, 0.5, 2, asked)
    assert (row.plain, row.plain_tokens_per_s, row.speedup) == ("plain-fa3", 20, 1)


def test_several_drafts_an_answer():
    """The limit is of what the server itself drafted, verified and accepted."""
    asked = settings(*TINY, "--draft-len", "128", "--staggered")
    config = ParseConfig(**asked.of_parse)
    assert (config.draft_tokens, config.segment, config.on_reject) == (128, "tokens:8", "redraft")
    assert asked.num_draft_rows == 129
    row = speed_at(bench_runs(), 0.5, 2, asked)
    assert (row.accepted, row.drafted, row.v) == pytest.approx((0.5, 1, 0.14))
    assert row.limit == pytest.approx(1 / (0.2 + 0.14 + 0.5))
    with pytest.raises(BenchError, match="--draft-len is 100, which --prefixes 16 does not"):
        settings(*TINY, "--draft-len", "100")


def test_graphs_are_captured_up_to_the_largest_concurrency(tmp_path: Path):
    asked = settings("--concurrency", "1,8", "--output", str(tmp_path))
    for spec in asked.specs():
        assert spec.common[spec.common.index("--cuda-graph-max-bs-decode") + 1] == "8"
