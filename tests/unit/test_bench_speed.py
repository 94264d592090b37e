"""The speed benchmark: refused settings, its servers, and its figures by hand."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from goals import goals_of
from rich.console import Console

from sglang_parse.client.records import Answer, BenchError, BenchRun, Variant
from sglang_parse.core.config import ParseConfig
from sglang_parse.core.simulation import BLOCK_ENV_VAR
from sglang_parse.core.simulation import ENV_VAR as SIMULATE
from sglang_parse.limit import run as run_module
from sglang_parse.limit.figures import ServerSpeed, speeds
from sglang_parse.limit.run import run as run_bench
from sglang_parse.limit.settings import LimitSettings, add_arguments

pytest.importorskip("transformers")
pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
TINY = ("--device", "cpu", "--target", "tiny_target", "--draft", "tiny_draft")


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def settings(*words: str) -> LimitSettings:
    return LimitSettings.read(parsed(*words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--target", "qwen3_7b"), "'qwen3_7b' gives no shape .*; use qwen3_0_6b, qwen3_14b, "),
        (("--draft", "tiny_draft"), "--draft tiny_draft has 1024 words, --target .*151936"),
        (("--draft-len", "16384"), "--draft-len or --block-tokens: .*16384; use a whole number"),
        (("--block-tokens", "17"), "SIMULATE_BLOCK is '17.0'; use a number from 1 to 16"),
        (("--servers", "plain@1"), "--servers names 'plain@1'; use plain, "),
        (("--servers", "parse-question"), "--servers names 'parse-question'; use plain, "),
        (("--servers", "parse@75%"), "ACCEPTANCE is '75%'; use a number from 0 .* every:N"),
        (("--servers", "eagle3@5"), "--servers names 'eagle3@5'; use an accept length of 1 to 4"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(words: tuple[str, ...], message: str):
    with pytest.raises(BenchError, match=message):
        settings(*words)


def test_settings_out_of_range_are_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parsed("--concurrency", "0,1")
    assert "; use " in capsys.readouterr().err


def test_shapes_for_cards_of_141_and_80_gb():
    assert settings().servers_at_once(141 * 10**9) == 1
    with pytest.raises(BenchError, match="qwen3_32b and qwen3_0_6b need about .*; use smaller"):
        settings().servers_at_once(80 * 10**9)
    assert settings("--target", "qwen3_14b").servers_at_once(85 * 10**9) == 2


def test_graphs_are_captured_for_whole_passes(tmp_path: Path):
    asked = settings("--target", "qwen3_14b", "--output", str(tmp_path))
    common = asked.specs()[0].common
    assert common[common.index("--cuda-graph-max-bs-decode") + 1] == "16"
    start = common.index("--cuda-graph-bs-prefill") + 1
    buckets = ("144", "272", "528", "1040", "1552", "2064")
    assert common[start : start + 6] == buckets
    assert common[start + 6] == "--dtype"


def test_servers_and_their_simulation(tmp_path: Path):
    names = "plain,eagle3@3,standalone@2.5,parse@every:32:7,parse-head@1,parse-one@0.5,draft"
    words = ("--servers", names, "--block-tokens", "4.9", "--output", str(tmp_path))
    specs = {spec.name: spec for spec in settings(*TINY, *words).specs()}
    assert list(specs) == names.split(",")
    block = {BLOCK_ENV_VAR: "4.9"}
    stock = {"SGLANG_SIMULATE_ACC_METHOD": "match-expected", "SGLANG_SIMULATE_ACC_LEN": "3"}
    assert dict(specs["eagle3@3"].environment) == block | stock
    assert dict(specs["parse@every:32:7"].environment) == block | {SIMULATE: "every:32:7"}
    judges = {
        name: spec.flags[spec.flags.index("--parse-judge") + 1]
        for name, spec in specs.items()
        if "--parse-judge" in spec.flags
    }
    head = judges.pop("parse-head@1")
    assert set(judges.values()) == {"likelihood"}
    assert {path.name for path in Path(head).iterdir()} == {"judge.json", "judge.safetensors"}
    draft = json.loads((tmp_path / "models/tiny_draft/config.json").read_text())
    assert draft["pard_token"] == draft["vocab_size"] - 1


def test_the_length_of_drafts_adapts_unless_it_is_given():
    assert "draft_tokens" not in ParseConfig(**settings(*TINY).of_parse).model_fields_set
    given = settings(*TINY, "--draft-len", "32")
    assert ParseConfig(**given.of_parse).draft_tokens == 32
    assert (
        given.kv_slots < settings(*TINY).kv_slots < settings(*TINY, "--block-tokens", "2").kv_slots
    )


def test_the_commands_of_a_lease():
    """The script cannot run without a GPU; its flags, shapes and servers are there."""
    script = ROOT / "tests/gpu/lease.sh"
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text().replace("\\\n", "")
    (command,) = re.findall(r"cli bench (.*?) --output", text)
    for target in ("qwen3_14b", "qwen3_32b"):
        asked = settings(*shlex.split(command.replace("$target", target)))
        assert asked.target.name == target
        assert asked.servers[:2] == ("plain", "eagle3@3")


def bench_run(server: str, run: int, seconds: float, **meta: Any) -> BenchRun:
    """Two requests at a time with 50 output tokens each."""
    answer = Answer(0, "", 50, 4000.0, meta)
    return BenchRun(Variant(server), run, 2, seconds, (answer,) * 2)


def bench_runs(server: str) -> list[BenchRun]:
    """Plain 10 tokens/s, EAGLE3 16, PARSE 20."""
    counters = {"mode": "parse", "rounds": 3, "accepted_tokens": 25, "matched_tokens": 5}
    counters |= {"draft_ms": 1000, "verify_ms": 500}
    seconds, meta = {
        "plain": (9, {}),
        "eagle3@3": (5.25, {"spec_accept_length": 3.0}),
    }.get(server, (4, {"parse": [counters]}))
    # The median run is late by 1 s.
    return [bench_run(server, run, seconds + late, **meta) for run, late in enumerate((0, 5, 1))]


def test_figures_by_hand():
    runs = [run for name in ("plain", "eagle3@3", "parse@0.5") for run in bench_runs(name)]
    plain, eagle3, parse = speeds(runs)
    assert (plain.server, plain.tokens_per_s, plain.limit) == ("plain", 10, None)
    assert (eagle3.over, eagle3.per_request) == ({"plain": 1.6}, {"spec_accept_length": 3})
    assert (parse.tokens_per_s, parse.over) == (20, {"plain": 2, "eagle3@3": 1.25})
    # Drafting takes 0.2 of the plain target's 100 ms per token, verification 0.1; 0.6 are drafted.
    assert parse.limit == pytest.approx(1 / (0.2 + 0.1 + 0.4))
    assert parse.per_request["rounds"] == 3
    assert "mode" not in parse.per_request
    (alone,) = speeds(bench_runs("parse@0.5"))
    assert (alone.over, alone.limit) == ({}, None)


def test_a_server_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each is in results.json before the next one is measured."""
    path, seen = tmp_path / "results.json", []

    def measure(specs: list, *_: Any) -> Iterator[tuple[str, Any]]:
        for spec in specs:
            is_broken = spec.name == "eagle3@3"
            yield spec.name, BenchError("no such module") if is_broken else bench_runs(spec.name)
            content = json.loads(path.read_text())
            seen.append([row["server"] for row in content["speeds"]])
            assert content["conditions"]["failed"] == (
                {"eagle3@3": "no such module"} if len(seen) > 1 else {}
            )

    monkeypatch.setattr(run_module, "_measure", measure)
    words = (*TINY, "--servers", "plain,eagle3@3,parse@1", "--output", str(tmp_path))
    assert run_bench(parsed(*words), Console(quiet=True)) == 1
    assert seen == [["plain"], ["plain"], ["plain", "parse@1"]]


def test_goals():
    over = {"plain": 6.9, "eagle3@3": 1.6}
    rows = [
        asdict(ServerSpeed(server, concurrency, 1.0, over, None, {}))
        for server in ("plain", "parse@1", "parse@every:32")
        for concurrency in (1, 8, 16)
    ]
    found = {goal.name: goal.is_reached for goal in goals_of({"speeds": rows})}
    assert found == {
        "parse@1 over plain at 1": False,
        "parse@1 over eagle3@3 at 16": False,
        "parse@every:32 over plain at 1": False,
        "parse@every:32 over eagle3@3 at 16": True,
    }
