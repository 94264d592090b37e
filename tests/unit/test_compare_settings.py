"""Settings of ``compare`` and of its presets."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_parse import cli
from sglang_parse.client.demo_pair import DEMO_PAIR
from sglang_parse.client.records import (
    ON_GPU,
    OTHER_JUDGES,
    TITLES,
    WITH_LAYER,
    BenchError,
    Variant,
    title_of,
)
from sglang_parse.client.targets import server_specs
from sglang_parse.compare.settings import PRESETS, CompareSettings, add_arguments
from sglang_parse.core.simulation import ENV_VAR
from support.calibration import FINGERPRINT

pytestmark = pytest.mark.unit


def settings(*words: str, preset: str = "compare") -> CompareSettings:
    parser = argparse.ArgumentParser()
    add_arguments(parser, **PRESETS.get(preset, {}))
    return CompareSettings.read(parser.parse_args(words))


def test_token_by_token_is_measured_at_its_own_threshold_only():
    assert settings().graded_variants("parse-one") == (Variant("parse-one"),)
    assert settings("--thresholds", "0.9").graded_variants("parse") == (
        *(Variant("parse"), Variant("parse", 0.9)),
    )


def test_a_flag_is_read_once_and_for_all():
    found = settings("--concurrency", "16,4", "--thresholds", "1.5,0", "--problems", "30")
    assert found.concurrencies == (1, 4, 16)  # other thresholds are measured one at a time
    assert found.thresholds == (0, 1.5)
    assert found.sweep_problems == 30
    assert found.tokenizer == found.target
    assert settings("--concurrency", "16,4", "--thresholds", "").concurrencies == (4, 16)


def test_presets():
    named = (*OTHER_JUDGES, *WITH_LAYER, *ON_GPU)
    assert settings().servers == tuple(name for name in TITLES if name not in named)
    demo, load = settings(preset="demo"), settings(preset="load")
    assert demo.servers[:2] == ("plain", "standalone")
    assert demo.loads("parse") == [(Variant("parse"), c) for c in (1, 4, 16)]
    assert (settings().waves, load.waves) == (3, 3)
    assert [demo.num_requests(c) for c in demo.concurrencies] == [4, 8, 32]
    assert [load.num_requests(c) for c in load.concurrencies] == [16, 16, 24, 48]
    assert load.num_timed == 3 * 104
    assert load.problems == load.traced == 0
    offs = [Variant("parse", off_fraction=off) for off in (0.0, 0.5, 1.0)]
    assert load.loads("parse")[:4] == [*((off, 1) for off in offs), (offs[0], 4)]
    assert replace(load, off_fractions=()).loads("parse")[0] == (offs[0], 1)
    assert load.loads("plain") == [(Variant("plain"), c) for c in (1, 4, 8, 16)]
    assert load.order(1) == load.servers[::-1]


def judge_flags(found: CompareSettings, kind: str) -> tuple[str, ...]:
    (spec,) = server_specs(found, (kind,))
    return spec.flags[-2:]


def test_servers_with_parse_have_the_verdict_head(tmp_path: Path):
    """The demo pair's by default, or the given one; the question if there is to be none."""
    given = ("--judge", str(tmp_path))
    with pytest.raises(BenchError, match="--judge is .*judge.json cannot be read.*train-judge"):
        settings(*given)
    asking = settings("--judge", "")
    with pytest.raises(BenchError, match="parse-head needs a verdict head"):
        judge_flags(asking, "parse-head")
    question = ("--parse-question", str(DEMO_PAIR / "question.json"))
    for found, kind in ((asking, "parse"), (settings(), "parse-question")):
        flag, path = judge_flags(found, kind)
        assert (flag, str(Path(path).absolute())) == question
    flag, path = judge_flags(settings(), "parse")
    assert (flag, Path(path).absolute()) == ("--parse-judge", DEMO_PAIR / "judge")
    assert settings("--target", str(DEMO_PAIR / "draft")).judge == str(path)
    assert settings("--target", "Qwen/Qwen3-32B", "--draft", "Qwen/Qwen3-0.6B").judge == ""
    content = {"version": 1, "pooling": "worst-token", "layers": [3], "hidden_size": 8}
    content |= {"fingerprint": FINGERPRINT.model_dump(), "first_verdicts": [0.5]}
    (tmp_path / "judge.json").write_text(json.dumps(content))
    found = settings(*given)
    for kind in ("parse", "parse-head"):
        assert judge_flags(found, kind) == ("--parse-judge", str(tmp_path))


def test_the_mtp_layer():
    """The demo pair's for its target; of another one its own."""
    found = settings("--servers", "nextn,parse-mtp", "--draft", "")
    assert Path(found.layer_path).absolute() == DEMO_PAIR / "mtp"
    other = settings("--target", "Qwen/Qwen3-32B", "--draft", "Qwen/Qwen3-0.6B", "--judge", "")
    assert (other.mtp, other.layer_path) == ("own", "")


def test_servers_that_run_are_taken_alone_unless_others_are_named():
    url = ("--url", "parse=http://127.0.0.1:1/v1")
    found = settings(*url, preset="load")
    assert (found.servers, found.baseline) == (("parse",), "parse")
    assert found.remotes["parse"].url == "http://127.0.0.1:1"
    assert settings(*url, "--servers", "plain").servers == ("plain", "parse")


def test_a_server_for_each_simulated_acceptance():
    found = settings("--servers", "plain,parse@0.3,parse@1", preset="load")
    assert len(found.loads("parse@1")) == 3 * 4
    specs = server_specs(found, found.own_servers)
    assert [spec.environment.get(ENV_VAR) for spec in specs] == [None, "0.3", "1"]
    assert title_of("parse@0.3") == "PARSE, 30% accepted"
    assert title_of("parse@every:32:7") == "PARSE, a refusal every 32 tokens"
    assert title_of("parse@doubt:32") == "PARSE, a refusal every 32 tokens, in doubt"
    assert title_of("eagle3@2.5") == "EAGLE3, accept length 2.5"


def test_runs_share_no_problem():
    found = settings("--concurrency", "1,4", "--runs", "2", "--thresholds", "")
    seen = [found.indices(run, c, found.num_timed) for run in range(2) for c in (1, 4)]
    assert sorted(index for some in seen for index in some) == list(range(2 * (8 + 12)))


@pytest.mark.parametrize("command", ["compare", *PRESETS])
def test_the_commands_are_there(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    output = PRESETS.get(command, {}).get("output", "build/compare")
    assert f"(default {output})" in " ".join(capsys.readouterr().out.split())


def test_help_is_there_at_once():
    """It imports nothing that takes long."""
    code = "import sys; from sglang_parse import cli\ntry: cli.main(['--help'])\n"
    code += (
        "except SystemExit: print({'sglang', 'torch', 'transformers', 'scipy'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")


def test_a_list_of_numbers(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        settings("--concurrency", "1,many")
    assert "'1,many' is no list of numbers" in capsys.readouterr().err
