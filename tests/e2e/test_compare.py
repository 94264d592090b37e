"""``make compare``, smaller: two servers that run already and one that is started for it."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from goals import goals_of
from rich.console import Console

from sglang_parse import cli
from sglang_parse.client.program import run_program
from sglang_parse.client.records import BenchError
from sglang_parse.client.servers import Remote
from sglang_parse.compare.run import run
from sglang_parse.compare.settings import CompareSettings, add_arguments
from support.client import Client
from support.pages import ROOT
from support.programs import forked
from support.warm import Nursery

SMALL = (
    *("--runs", "1", "--requests", "1", "--warmup", "1", "--traced", "1"),
    *("--concurrency", "1,2", "--thresholds", "0,1.5", "--problems", "4", "--sweep-problems", "2"),
)


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


@pytest.fixture(scope="module")
def results(
    wordings: Client,
    wordings_plain: Client,
    nursery: Nursery,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict:
    output = tmp_path_factory.mktemp("compare")
    urls = ("--url", f"plain={wordings_plain.url}", "--url", f"parse={wordings.url}")
    words = ("--servers", "plain,eagle3,parse", *urls, *SMALL, "--output", str(output))
    with forked(nursery):
        run(parsed(*words), Console(quiet=True))
    page = (output / "report.html").read_text(encoding="utf-8")
    assert "<th>over EAGLE3</th>" in page
    return json.loads((output / "results.json").read_text(encoding="utf-8"))


@pytest.mark.nightly("tests/unit/test_compare_run.py")
def test_every_variant_is_measured(results: dict):
    found = {(v["server"], v["threshold"]): v for v in results["variants"]}
    parse = [("parse", threshold) for threshold in (None, 0.0, 1.5)]
    assert list(found) == [("plain", None), ("eagle3", None), *parse]
    for (server, threshold), variant in found.items():
        # Other thresholds than the server's own are measured at one request at a time.
        expected = [1, 2] if threshold is None else [1]
        assert [speed["concurrency"] for speed in variant["speeds"]] == expected
        for speed in variant["speeds"]:
            assert speed["stages"] == {} or server == "parse"
            assert 0 < speed["tokens_per_s"]["low"] <= speed["tokens_per_s"]["median"]
            for percentiles in speed["latency_ms"].values():
                assert 0 <= percentiles["p50"] <= percentiles["p99"]
    assert len(results["serving_runs"]) == 8
    # Tokens are the server's count, not the number of tokens asked for.
    assert all(item["output_tokens"] < 200 * item["requests"] for item in results["serving_runs"])
    assert found["eagle3", None]["accept_length"] > 2
    assert found["plain", None]["accept_length"] is None
    assert found["parse", 0.0]["accept_length"] > 40


@pytest.mark.nightly("tests/unit/test_compare_run.py")
def test_answers_are_graded_and_tested(results: dict):
    found = {(v["server"], v["threshold"]): v["quality"] for v in results["variants"]}
    assert found["plain", None]["score"] >= 0.75
    # EAGLE3 and a threshold above 1 write the plain target's text: no problem differs.
    for variant in (("eagle3", None), ("parse", 1.5)):
        test = found[variant]["test"]
        assert (test["better"], test["worse"], test["p_value"]) == (0, 0, 1)
    assert results["noise"] == found["eagle3", None]["test"]
    assert found["parse", 0.0]["problems"] == 2


@pytest.mark.nightly("tests/unit/test_compare_run.py")
def test_stage_times_follow_the_threshold(results: dict):
    time = {v["threshold"]: v["time"] for v in results["variants"] if v["server"] == "parse"}
    assert time[1.5]["draft_fraction"] == 0
    assert time[0.0]["draft_fraction"] > 0.9
    assert time[0.0]["ms_per_request"]["draft"] > 0
    # Rejected drafts that the target would have written cost it no step: nor do kept ones.
    assert time[1.5]["rounds_per_request"] >= time[0.0]["rounds_per_request"] >= 1


@pytest.mark.nightly("tests/unit/test_compare_run.py")
def test_conditions(results: dict):
    conditions = results["conditions"]
    assert "--speculative-algorithm EAGLE3" in conditions["servers"]["EAGLE3"]
    assert conditions["servers"]["PARSE"].startswith("http://")
    assert conditions["bench_serving"].startswith("python -m sglang.bench_serving --backend")
    assert {"sglang", "torch"} <= set(conditions["versions"])
    names = {goal.name for goal in goals_of(results)}
    assert {"PARSE over EAGLE3 at 1", "fraction of the limit"} <= names


@pytest.mark.nightly("tests/unit/test_compare_run.py")
def test_prompts_of_a_file(wordings: Client, nursery: Nursery, tmp_path: Path):
    """From GSM8K's own file to the page; the demo's models cannot read the question."""
    (tmp_path / "test.jsonl").write_text('{"question": "Start with 23", "answer": "#### 9999"}\n')
    grader = shlex.join([sys.executable, str(ROOT / "examples" / "grade_math.py")])
    command = [*shlex.split(grader), "--prompts", str(tmp_path / "test.jsonl")]
    prompts = tmp_path / "gsm8k.jsonl"
    prompts.write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
    task = ("--task-file", str(prompts), "--grader", grader, "--max-tokens", "64")
    load = ("--runs", "1", "--requests", "1", "--concurrency", "1", "--thresholds", "")
    few = ("--warmup", "1", "--traced", "1", "--output", str(tmp_path))
    words = (*task, *load, *few, "--url", f"parse={wordings.url}")
    with forked(nursery):
        run(parsed(*words), Console(quiet=True))
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["conditions"]["task"] == "gsm8k.jsonl"
    (variant,) = results["variants"]
    assert (variant["quality"]["problems"], variant["quality"]["score"]) == (1, 0)


BAD = [
    (("--url", "mine=http://x"), "NAME=http"),
    (("--servers", "plain,vllm"), "'vllm'; use plain"),
    (("--servers", "plain,plain"), "twice"),
    (("--target", "./nowhere"), "no config.json"),
    (("--eagle3", "", "--servers", "eagle3"), "give --eagle3"),
    (("--task-file", __file__), "is not JSON"),
    (("--url", "plain=http://127.0.0.1:9"), "does not answer"),
]


@pytest.mark.parametrize(("words", "text"), BAD)
def test_bad_settings_are_refused(words, text: str, tmp_path: Path, capsys):
    assert run_program("compare", run, parsed(*words, "--output", str(tmp_path))) == 1
    assert text in capsys.readouterr().err


def test_a_url_may_end_in_v1():
    settings = CompareSettings.read(parsed("--url", "plain=http://host:1/v1/"))
    assert settings.servers == ("plain",)
    assert settings.remotes == {"plain": Remote("plain", "http://host:1")}


def test_a_server_that_does_not_use_parse_is_an_error(wordings_plain: Client, tmp_path: Path):
    words = ("--url", f"parse={wordings_plain.url}", *SMALL, "--output", str(tmp_path))
    with pytest.raises(BenchError, match="did not serve problem 0 with PARSE"):
        run(parsed(*words), Console(quiet=True))


def test_the_doctor_says_that_a_server_is_not_parse(wordings_plain: Client, capsys):
    assert cli.main(["doctor", "--url", wordings_plain.url, "--json"]) == 1
    found = {entry["check"]: entry for entry in json.loads(capsys.readouterr().out)["findings"]}
    assert (found["server"]["status"], found["PARSE"]["status"]) == ("ok", "fails")
    assert found["PARSE"]["fix"] == "start it with --speculative-algorithm PARSE"
