"""The speed benchmark: refused settings, its servers, and its figures by hand."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from goals import goals_of
from rich.console import Console

from sglang_parse.bench import run as run_module
from sglang_parse.bench.run import random_task
from sglang_parse.bench.run import run as run_bench
from sglang_parse.bench.settings import BenchSettings, add_arguments
from sglang_parse.client.records import Answer, BenchError, BenchRun, ServingRun, Variant
from sglang_parse.client.targets import simulated_lens
from sglang_parse.compare.figures import Measured, make_comparison
from sglang_parse.core.config import ParseConfig
from sglang_parse.core.simulation import BLOCK_ENV_VAR
from sglang_parse.core.simulation import ENV_VAR as SIMULATE

pytest.importorskip("transformers")
pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
LENGTH = 50
TINY = ("--device", "cpu", "--target", "tiny_target", "--draft", "tiny_draft")


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def settings(*words: str) -> BenchSettings:
    return BenchSettings.read(parsed(*words))


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
    assert specs["eagle3@3"].environment == block | simulated_lens(3.0, 4)
    assert specs["parse@every:32:7"].environment == block | {SIMULATE: "every:32:7"}
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


def test_a_dflash_draft_of_the_targets_shape(tmp_path: Path):
    words = ("--servers", "dflash@5,ngram", "--target", "qwen3_14b", "--output", str(tmp_path))
    asked = settings(*words)
    assert (asked.compared.waves, asked.compared.num_requests(16)) == (4, 64)
    dflash, _ = asked.specs()
    folder = Path(dflash.flags[dflash.flags.index("--speculative-draft-model-path") + 1])
    draft = json.loads((folder / "config.json").read_text())
    assert draft["dflash_config"]["target_layer_ids"] == [1, 10, 20, 29, 39]
    assert (draft["num_hidden_layers"], draft["block_size"]) == (5, 16)
    with pytest.raises(BenchError, match="run on GPUs only"):
        settings(*TINY, "--servers", "ngram", "--output", str(tmp_path)).specs()


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


def add_runs(measured: Measured, server: str) -> None:
    """Two at a time, and one answer alone: plain 10 tokens/s, EAGLE3 16, PARSE 20."""
    counters = {"mode": "parse", "rounds": 3, "accepted_tokens": 25, "matched_tokens": 5}
    counters |= {"draft_ms": 1000, "verify_ms": 500, "prefill_ms": 9, "decode_ms": 99}
    counters |= {"simulated": 1.0} if server != "parse@0" else {}
    rate = {"plain": 10.0, "eagle3@3": 16.0}.get(server, 20.0)
    for run, late in enumerate((1, 0.5, 0.9)):  # the median is 0.9
        for concurrency in (1, 2):
            numbers = (2, 2 * LENGTH, 1.0, late * rate, {"e2e": {"p50": 1, "p90": 1, "p99": 1}})
            measured.serving.append(ServingRun(Variant(server), run, concurrency, *numbers, None))
        if server != "plain":
            meta = {"spec_accept_length": 3.0} if server == "eagle3@3" else {"parse": [counters]}
            answers = (Answer(0, "", 50, 4000.0, meta),)
            measured.traced.append(BenchRun(Variant(server), run, 1, 1.0, answers))


def test_figures_by_hand():
    measured, names = Measured(), ("plain", "eagle3@3", "parse@0.5")
    for name in names:
        add_runs(measured, name)
    plain, eagle3, parse = make_comparison(measured, names, "plain").variants
    assert (plain.speeds[1].tokens_per_s.median, plain.time) == (9, None)
    assert (eagle3.speeds[1].over["plain"].median, eagle3.accept_length) == (1.6, 3)
    assert eagle3.time is None
    over = {name: spread.median for name, spread in parse.speeds[1].over.items()}
    assert over == {"plain": 2, "eagle3@3": 1.25}
    # Drafting takes 20 ms per token, verification 10; 0.6 of the tokens are drafted. The plain
    # target takes 100 ms, 200 and 111.
    assert parse.time.limit == pytest.approx(1 / (0.18 + 0.09 + 0.4))
    assert parse.time.per_request["rounds"] == 3
    assert "mode" not in parse.time.per_request


def test_requests_are_random_and_of_one_length():
    found = settings(*TINY, "--input-len", "5", "--output-len", "9", "--concurrency", "1,4")
    task = random_task(found)
    prompts = [item.request["input_ids"] for item in task.items]
    assert (
        len({*map(tuple, prompts)}) == len(prompts) == found.compared.num_timed == 3 * (2 + 4 * 4)
    )
    few = settings(*TINY, "--runs", "1", "--concurrency", "1")
    assert few.compared.num_timed == 2
    assert len(random_task(few).items) == few.compared.warmup  # all of a warm-up's differ
    assert {len(prompt) for prompt in prompts} == {5}
    assert all(item.request["ignore_eos"] for item in task.items)
    assert task.max_tokens == 10


def test_a_server_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each is in results.json before the next one is measured."""
    path, seen = tmp_path / "results.json", []

    def turn(runner: Any, server: str, number: int) -> None:
        del number
        if path.exists():
            content = json.loads(path.read_text())
            seen.append([one["server"] for one in content["variants"]])
        if server == "eagle3@3":
            raise BenchError("no such module")
        add_runs(runner.measured, server)

    monkeypatch.setattr(run_module.Pool, "start_all", lambda _: None)
    monkeypatch.setattr(run_module.Runner, "turn", turn)
    words = (*TINY, "--servers", "plain,eagle3@3,parse@0,parse@1", "--runs", "1")
    words = (*words, "--output-len", str(LENGTH - 1), "--output", str(tmp_path))
    assert run_bench(parsed(*words), Console(quiet=True)) == 1
    assert seen == [["plain"], ["plain"], ["plain"]]
    content = json.loads(path.read_text())
    assert [one["server"] for one in content["variants"]] == ["plain", "parse@1"]
    failed = content["conditions"]["failed"]
    assert failed["eagle3@3"] == "no such module"
    assert failed["parse@0"].startswith("acceptance is not simulated")
    words = (*words, "--output-len", "7")
    assert run_bench(parsed(*words), Console(quiet=True)) == 1
    failed = json.loads(path.read_text())["conditions"]["failed"]
    assert failed["plain"] == f"2 answers have {2 * LENGTH} tokens"


def test_goals():
    over = {"plain": {"median": 6.9}, "eagle3@3": {"median": 1.6}}
    speeds = [{"concurrency": concurrency, "over": over} for concurrency in (1, 8, 16)]
    names = ("plain", "parse@1", "parse@every:32")
    variants = [{"server": server, "speeds": speeds} for server in names]
    results = {"conditions": {"failed": {}}, "variants": variants}
    found = {goal.name: goal.is_reached for goal in goals_of(results)}
    assert found == {
        "parse@1 over plain at 1": False,
        "parse@1 over eagle3@3 at 16": False,
        "parse@every:32 over plain at 1": False,
        "parse@every:32 over eagle3@3 at 16": True,
    }
