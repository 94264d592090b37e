"""Runs every command and program in the README and in docs/.

Blocks run unchanged; those that take minutes to hours run smaller, or as a dry run.
tests/unit/test_pages.py checks what needs no server.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from sglang_parse import cli
from sglang_parse.client.servers import Server, ServerSpec, awake, free_ports
from sglang_parse.core.config import ENV_VAR, ParseConfig
from sglang_parse.core.judge import read_judge
from sglang_parse.telemetry.metrics import METRICS, PREFIX
from sglang_parse.trial import settings as trial
from support.client import Client, assert_same, parse_info, random_prompts
from support.demo_pair import DEMO, held_out
from support.pages import PAGES, ROOT, documented_keys
from support.random_pair import PairShape, make_pair
from support.servers import PARSE, SEED, Start, plugin, served
from support.warm import Nursery

PORT = "30000"
FENCE = re.compile(r"^( *)```(.*?)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
RUN, SHOWN = {"sh", "python"}, {"", "text"}
"""Languages of blocks that are run, and of those that only show something."""

# Text that identifies a block -> the test that runs it. A block that matches none or two of them
# fails `test_every_block_is_run_by_one_test`.
RUN_BY = {
    "make ": "test_make_targets_exist",
    "-m pytest ": "test_pytest_commands_exist",
    "-m sglang_parse.cli bench ": "test_bench",
    "-m sglang_parse.cli calibrate ": "test_calibrate",
    "-m sglang_parse.cli train-judge ": "test_train_judge",
    "-m sglang.launch_server": "server (fixture)",
    "30000/v1/chat/completions": "test_curl",
    "30000/metrics": "test_metrics",
    "grep PARSE: ": "test_log",
    "openai.OpenAI(": "test_openai_program",
    "sgl.Engine(": "test_engine_program",
    "examples/frontend/": "test_frontend_programs",
    "AutoModelForCausalLM": "test_recomputed_verdicts",
    "sglang-parse doctor": "test_doctor",
    "sglang-parse explain": "test_explain",
    "sglang-parse models": "test_models",
    "sglang-parse roofline": "test_roofline",
    "sglang-parse try": "test_try",
    "examples/parallel_draft.py": "test_parallel_draft",
    "examples/demo_pair/untrained.py": "test_untrained_draft",
    "sgl-eval run ": "test_sgl_eval_command",
    "examples/grade_math.py": "test_calibrate_with_math_verify",
    "class EchoSource": "test_the_source_of_the_page_drafts_and_changes_no_token",
}


def fences() -> list[tuple[Path, str, str]]:
    """Returns page, language and text of every block."""
    return [
        (page, language, dedent(text))
        for page, content in PAGES.items()
        for _, language, text in FENCE.findall(content)
    ]


def blocks() -> list[str]:
    """Returns the blocks to run, without duplicates."""
    return list(dict.fromkeys(text for _, language, text in fences() if language in RUN))


def find_block(mark: str) -> str:
    (block,) = [text for text in blocks() if mark in text]
    return block


# -- blocks ---------------------------------------------------------------------


def test_every_fence_has_a_known_language():
    assert {language for _, language, _ in fences()} <= RUN | SHOWN
    marks = sum(content.count("```") for content in PAGES.values())
    assert marks == 2 * len(fences())


@pytest.mark.parametrize("block", blocks(), ids=lambda text: text.split("\n")[0][:40])
def test_every_block_is_run_by_one_test(block: str):
    assert len([mark for mark in RUN_BY if mark in block]) == 1
    runner = RUN_BY[next(mark for mark in RUN_BY if mark in block)]
    assert runner.split()[0] in globals()


def test_every_runner_has_a_block():
    assert [mark for mark in RUN_BY if not any(mark in block for block in blocks())] == []


MAKE_BLOCKS = [block for block in blocks() if "make " in block]


@pytest.mark.parametrize("block", MAKE_BLOCKS, ids=lambda text: text.split("\n")[0][:40])
def test_make_targets_exist(block: str):
    """Dry runs, because the targets take minutes to hours."""
    for line in block.splitlines():
        words = shlex.split(line, comments=True)
        assert words[0] == "make"
        subprocess.run([*words, "--dry-run"], cwd=ROOT, capture_output=True, check=True)
        for path in re.findall(r"tests/\S+", " ".join(words)):
            assert (ROOT / path).exists()


PYTEST_BLOCKS = [block for block in blocks() if "-m pytest " in block]


@pytest.mark.parametrize("block", PYTEST_BLOCKS, ids=lambda text: text.split("\n")[0][:60])
def test_pytest_commands_exist(block: str, pytestconfig: pytest.Config):
    """Checks files and markers only; the tests run anyway."""
    kinds = {line.partition(":")[0] for line in pytestconfig.getini("markers")}
    for line in block.splitlines():
        python, *run, first, second = shlex.split(line)[:5]
        assert [python, *run] == [".venv/bin/python", "-m", "pytest"]
        if first == "-m":
            assert second in kinds
        else:
            assert all((ROOT / path).is_file() for path in shlex.split(line)[3:])


@pytest.mark.nightly("tests/unit/test_compare_run.py")
@pytest.mark.usefixtures("programs")
def test_make_demo_runs_a_small_demo(wordings_plain: Client, tmp_path: Path, capsys: Any):
    """Runs the command of `make demo` with one problem: two of its servers beside one that runs."""
    flags = ["--requests", "1", "--runs", "1", "--concurrency", "1", "--warmup", "1"]
    flags += ["--traced", "1", "--servers", "plain,parse,parse-eagle3"]
    flags += ["--url", f"plain={wordings_plain.url}"]
    assert cli.main(["demo", *flags, "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for text in ("PARSE's speed over the plain target: ", "Right answers: PARSE ", "sglang-parse"):
        assert text in printed
    assert "FAIL" not in printed
    content = json.loads((tmp_path / "results.json").read_text())
    parse = next(v for v in content["variants"] if v["server"] == "parse")
    assert (parse["quality"]["problems"], parse["quality"]["score"]) == (1, 1)
    assert parse["time"]["limit"] > 1
    assert sum(parse["speeds"][0]["stages"].values()) < 1.1
    assert (tmp_path / "report.html").is_file()


@pytest.mark.nightly("tests/unit/test_bench_speed.py")
@pytest.mark.usefixtures("programs")
def test_bench(tmp_path: Path, capsys: Any):
    """A rehearsal of a GPU's: real servers with tiny shapes and dummy weights, accepted lengths as
    simulated."""
    words = shlex.split(find_block("-m sglang_parse.cli bench ").replace("\\\n", " "))
    assert cli.main([*words[3:], "--output", str(tmp_path)]) == 0
    assert "EAGLE3, accept length 3" in capsys.readouterr().out
    assert "over EAGLE3, accept length 3" in (tmp_path / "report.html").read_text()
    content = json.loads((tmp_path / "results.json").read_text())
    found = {one["server"]: one for one in content["variants"]}
    assert list(found) == ["plain", "eagle3@3", "standalone@2.5", "parse@every:8", "parse-head@1"]
    assert not content["conditions"]["failed"]
    assert found["eagle3@3"]["accept_length"] == pytest.approx(3, rel=0.1)
    assert found["standalone@2.5"]["accept_length"] == pytest.approx(2.5, rel=0.25)
    for name in ("parse@every:8", "parse-head@1"):
        (speed,) = found[name]["speeds"]
        assert {"plain", "eagle3@3", "standalone@2.5"} < set(speed["over"])
        assert set(speed["latency_ms"]) == {"e2e"}
        assert 0 < speed["stages"]["verify"] < 1
        # 3.5 tokens a block, or one where single tokens are faster.
        assert 1 <= found[name]["time"]["per_request"]["tokens_per_draft_forward"] < 3.6
    refused, accepted = (
        found[name]["time"]["per_request"] for name in ("parse@every:8", "parse-head@1")
    )
    assert accepted["accepted_tokens"] == 32
    assert accepted["rounds"] == 1
    assert 1 < refused["rounds"] < 12
    assert refused["target_tokens"] == pytest.approx(33 - refused["accepted_tokens"])
    log = (tmp_path / "logs" / "parse@every:8.log").read_text()
    assert "PARSE: simulated acceptance (SGLANG_PARSE_SIMULATE_ACCEPTANCE=every:8)" in log
    assert "PARSE: simulated blocks (SGLANG_PARSE_SIMULATE_BLOCK=3.5)" in log
    assert_bench_keys_are_documented(content)


def assert_bench_keys_are_documented(content: dict[str, Any]) -> None:
    keys = {f"conditions.{key}" for key in content["conditions"]}
    assert documented_keys("bench keys") <= keys
    assert keys <= documented_keys("bench keys") | documented_keys("compare keys")


@pytest.mark.nightly("tests/unit/test_train_judge.py")
@pytest.mark.usefixtures("programs")
def test_train_judge(tmp_path: Path, capsys: Any):
    """Few drafts of the demo, which starts a server of its own."""
    words = shlex.split(find_block("-m sglang_parse.cli train-judge "))
    assert cli.main([*words[3:], "--requests", "24", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "24 of 24 drafts have a label" in printed
    # So few are enough for a head, or for the reason why there is none.
    has_head = "There is no head: " not in printed
    assert (tmp_path / "judge.safetensors").exists() == has_head
    if has_head:
        content = json.loads((tmp_path / "judge.json").read_text())
        assert documented_keys("train-judge keys") == {*content}
        assert ParseConfig(judge=str(tmp_path)).head is not None


@pytest.mark.nightly("tests/unit/test_parallel_draft.py")
def test_parallel_draft(tmp_path: Path, nursery: Nursery):
    """Two training steps of a tiny draft on its own answers save a draft of the same shape."""
    draft = make_pair(tmp_path / "pair", PairShape(num_layers=2))[1]
    data, out = tmp_path / "conversations.jsonl", tmp_path / "out"
    turns = [[{"role": "user", "content": f"Start with {n}"}] for n in range(20, 26)]
    data.write_text("".join(json.dumps({"messages": some}) + "\n" for some in turns))
    words = shlex.split(find_block("examples/parallel_draft.py").replace("\\\n", " "))
    # The last value of a flag counts; the demo tokenizer has no unused id for the mask.
    own = ["--model", draft, "--data", data, "--output-dir", out, "--mask-token", "\u00ff"]
    small = "--max_new_tokens 12 --held_out 2 --max_steps 2 --use_cpu"
    printed = nursery.run(*words[1:], *own, *small.split())
    figures, _ = json.JSONDecoder().raw_decode(printed, printed.index("{\n"))
    assert figures["texts"] == 2
    assert len(figures["right_by_depth"]) == 8
    config = AutoConfig.from_pretrained(out)
    assert (config.pard_token, config.spd_type) == (190, "pard")
    saved, first = (load_file(folder / "model.safetensors") for folder in (out, draft))
    assert {name: (value.shape, value.dtype) for name, value in saved.items()} == {
        name: (value.shape, value.dtype) for name, value in first.items()
    }
    assert any(not torch.equal(saved[name], first[name]) for name in first)


@pytest.mark.nightly(
    "tests/e2e/test_drafting_pays.py::test_drafting_is_suspended_where_it_does_not_pay"
)
@pytest.mark.usefixtures("programs")
def test_untrained_draft(wordings_plain: Client, tmp_path: Path, nursery: Nursery):
    """Drafting takes less time than decoding; none if the warm-up already suspended it."""
    first, second = find_block("examples/demo_pair/untrained.py").replace("\\\n", " ").splitlines()
    draft, output = tmp_path / "untrained", tmp_path / "load"
    _, program, place = shlex.split(first)
    nursery.run(program, draft)
    # Also within the words of --parse-flags.
    words = [word.replace(place, shlex.quote(str(draft))) for word in shlex.split(second)]
    assert any(str(draft) in word for word in words)
    few = ("--concurrency", "1", "--requests", "2", "--runs", "1", "--max-tokens", "32")
    plain = ("--url", f"plain={wordings_plain.url}")  # it starts one that is there already
    assert cli.main([*words[3:], *few, *plain, "--output", str(output)]) == 0
    plain, parse = json.loads((output / "results.json").read_text())["variants"]
    assert (plain["speeds"][0]["stages"], parse["server"]) == ({}, "parse-token")
    stages = parse["speeds"][0]["stages"]
    assert stages["draft"] < stages["decode"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Iterator[Server]:
    """Launches the server of the documents, on a free port. It also drafts on a busy machine and
    leaves its core to the programs while it waits."""
    words = shlex.split(find_block("-m sglang.launch_server").replace("\\\n", " "))
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    (port,) = free_ports(1)
    flags = tuple(str(ROOT / word) if word.startswith("examples/") else word for word in words[3:])
    place = flags.index("--port")
    assert flags[place + 1] == PORT
    flags = (*flags[:place], *flags[place + 2 :], "--parse-drafting", "always", "--sleep-on-idle")
    spec = ServerSpec("documents", flags, common=())
    log = tmp_path_factory.mktemp("documents") / "server.log"
    server = Server(spec, port, log, nursery.start)
    try:
        server.wait_ready()
        server.suspend()
        yield server
    finally:
        server.stop()


def run(server: Server, mark: str) -> str:
    """Returns the standard output of a shell's block that must succeed."""
    command = ["bash", "-c", find_block(mark).replace(PORT, str(server.port))]
    with awake(server):
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_curl(server: Server):
    answer = json.loads(run(server, "30000/v1/chat/completions"))
    (choice,) = answer["choices"]
    assert choice["message"]["content"]
    assert choice["meta_info"]["parse"][0]["mode"] == "parse"


def test_metrics(server: Server):
    printed = run(server, "30000/metrics")
    for metric in METRICS:
        assert PREFIX + metric.name in printed or metric.is_gauge or not metric.label_values


@pytest.mark.nightly("tests/unit/test_calibrate_run.py")
@pytest.mark.usefixtures("programs")
def test_calibrate(server: Server, tmp_path: Path, capsys: Any):
    """Runs with few requests, then again with another alpha, which resumes from disk."""
    words = shlex.split(find_block("-m sglang_parse.cli calibrate ").replace("\\\n", " "))
    few = ["--requests", "16", "--pilot", "8", "--served", "4", "--concurrency", "8"]
    own = ["--url", server.url, "--model-name", "default", "--output", str(tmp_path)]
    with awake(server):
        assert cli.main([*words[3:], *few, *own]) == 0
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "calibration.json").read_text())
    served = read_judge(str(ROOT / "examples/demo_pair/judge")).threshold
    names = ("first-drafts", "plain-answers", f"answers-first-reject-{served}")
    files = [json.loads((tmp_path / f"{name}.json").read_text()) for name in names]
    # 16 requests cannot certify 5 %: a result, no error.
    assert found["threshold"] is None
    assert "No threshold qualifies" in printed
    assert [len(file["results"]) for file in files] == [24, 4, 4]
    assert found["results"]["served"][0]["accuracy"]["total"] == 4
    assert f"The server's threshold {served:g} is NOT certified" in printed
    assert "No threshold qualifies" in (tmp_path / "report.html").read_text()
    looser = [*few, *own, "--alpha", "0.5"]
    with awake(server):
        assert cli.main([*words[3:], *looser]) == 0
    assert "is certified" in capsys.readouterr().out
    again = json.loads((tmp_path / "calibration.json").read_text())
    assert again["fingerprint"] == found["fingerprint"]
    assert json.loads((tmp_path / "first-drafts.json").read_text()) == files[0]
    config = ParseConfig(threshold=str(tmp_path / "calibration.json"))
    assert config.accept_threshold == again["threshold"]


@pytest.mark.nightly("tests/unit/test_calibrate_run.py")
@pytest.mark.usefixtures("programs")
def test_calibrate_with_math_verify(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """Makes the task file of two problems and calibrates on it."""
    pytest.importorskip("math_verify")
    # The block's grader is "python ...": the one that has math_verify.
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    install, make, calibrate = find_block("examples/grade_math.py").splitlines()
    assert install == "pip install math-verify"
    rows = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(4)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = make.replace("python ", f"{shlex.quote(sys.executable)} ")
    words = words.replace("examples/", f"{shlex.quote(str(ROOT))}/examples/")
    subprocess.run(["bash", "-c", words], cwd=tmp_path, check=True)
    program, command, *flags, rest = shlex.split(calibrate)
    assert (program, command, rest) == ("sglang-parse", "calibrate", "...")
    few = ["--requests", "2", "--pilot", "2", "--served", "0", "--max-tokens", "24"]
    own = ["--url", server.url, "--model-name", "default", "--output", str(tmp_path / "out")]
    flags = [str(tmp_path / "gsm8k.jsonl") if flag == "gsm8k.jsonl" else flag for flag in flags]
    with contextlib.chdir(ROOT), awake(server):
        assert cli.main([command, *flags, *few, *own]) == 0
    assert "No threshold qualifies" in capsys.readouterr().out


def test_sgl_eval_command():
    """Its version and flags are those that were run by hand on 27 November 2026: it is none of our
    dependencies (it needs older pandas and datasets)."""
    install, evaluate = find_block("sgl-eval run ").splitlines()
    assert install == "pip install sgl-eval==0.1.3"
    assert shlex.split(evaluate)[:3] == ["sgl-eval", "run", "gsm8k"]
    assert set(re.findall(r"--[a-z-]+", evaluate)) == {"--base-url", "--num-examples", "--out-dir"}


def test_log(server: Server):
    (line,) = find_block("grep PARSE: ").splitlines()
    command = shlex.split(line)
    printed = subprocess.check_output(command, cwd=server.log.parent, text=True)
    assert "verify passes use the layout" in printed


def test_openai_program(server: Server, nursery: Nursery):
    program = find_block("openai.OpenAI(").replace(PORT, str(server.port))
    with awake(server):
        printed = nursery.run("-c", program)
    assert "'mode': 'parse'" in printed
    assert "'reason': 'switched off'" in printed


@pytest.mark.nightly("tests/e2e/test_demo_programs.py")
def test_frontend_programs(server: Server, nursery: Nursery):
    expected = {
        "gen": "'mode': 'parse'",
        "fork": "most: [('",
        "multi_turn": "tokens from the cache",
        "choose": "chosen: 'a: 23 + 45 = 68'",
        "constrained": "parse: drafted",
        "options": "switched off: plain, 0 of 0",
    }
    lines = [shlex.split(x, comments=True) for x in find_block("examples/frontend/").splitlines()]
    assert {Path(path).stem for _, path, _ in lines} == set(expected)
    assert set(expected) == {path.stem for path in (ROOT / "examples" / "frontend").glob("*.py")}
    for _, path, url in lines:
        with awake(server):
            printed = nursery.run(path, url.replace(PORT, str(server.port)))
        assert expected[Path(path).stem] in printed
    assert "verdicts prediction" in printed  # the last one sends a draft


def test_recomputed_verdicts(server: Server, tmp_path: Path, capsys: Any):
    program = tmp_path / "verdicts.py"
    program.write_text(find_block("AutoModelForCausalLM").replace(PORT, str(server.port)))
    with contextlib.chdir(ROOT), awake(server):
        runpy.run_path(str(program), run_name="__main__")
    assert "prefix of" in capsys.readouterr().out


def run_program(server: Server, words: list[str]) -> int:
    """Runs a ``sglang-parse`` command line in this process and returns its exit code."""
    assert words[0] == "sglang-parse"
    with contextlib.chdir(ROOT), awake(server), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "end_on_sigterm", lambda: None)
        patch.setenv(ENV_VAR, "")  # the doctor parses server flags into it
        return cli.main([word.replace(PORT, str(server.port)) for word in words[1:]])


@pytest.mark.nightly("tests/compat/test_doctor.py")
def test_doctor(server: Server, capsys: pytest.CaptureFixture[str]):
    block = find_block("sglang-parse doctor").replace("\\\n", " ")
    before, running = (shlex.split(line, comments=True) for line in block.splitlines())
    (port,) = free_ports(1)  # the command's default may be in use
    assert run_program(server, [*before, "--port", str(port)]) == 0
    assert "SGLang and PARSE accept these settings" in " ".join(capsys.readouterr().out.split())
    assert run_program(server, [*running, "--requests", "2"]) == 0
    assert "over plain decoding" in " ".join(capsys.readouterr().out.split())


def test_explain(server: Server, tmp_path: Path):
    words = shlex.split(find_block("sglang-parse explain"))
    assert run_program(server, [*words, "--output", str(tmp_path)]) == 0
    served = read_judge(str(ROOT / "examples/demo_pair/judge")).threshold
    page = (tmp_path / "explain.html").read_text(encoding="utf-8")
    assert f"Judge: head, threshold {served:g}" in page


@pytest.mark.usefixtures("programs")
def test_models(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(ROOT)
    program, *words = shlex.split(find_block("sglang-parse models"), comments=True)
    assert (program, cli.main(words)) == ("sglang-parse", 0)
    assert "as target: served" in capsys.readouterr().out


@pytest.mark.usefixtures("programs")
def test_roofline(capsys: pytest.CaptureFixture[str]):
    program, *words = shlex.split(find_block("sglang-parse roofline"))
    assert (program, cli.main(words)) == ("sglang-parse", 0)
    assert "Speedup by acceptance" in capsys.readouterr().out


def test_try():
    """Its flags; tests/e2e/test_try.py runs it."""
    _, *commands = find_block("sglang-parse try").splitlines()
    for line in commands:
        program, name, *words = shlex.split(line, comments=True)
        parser = argparse.ArgumentParser()
        trial.add_arguments(parser)
        trial.TrialSettings.read(parser.parse_args(words))
        assert (program, name) == ("sglang-parse", "try")


def test_engine_program(tmp_path: Path, nursery: Nursery):
    # A file, because the engine's processes import the main module.
    program = tmp_path / "engine.py"
    program.write_text(find_block("sgl.Engine("), encoding="utf-8")
    printed = nursery.run(program)
    assert "'mode': 'parse'" in printed
    assert int(re.search(r"'accepted_tokens': (\d+), 'rejected", printed)[1]) > 16


def test_the_source_of_the_page_drafts_and_changes_no_token(
    start_server: Start, small_plain: Client
):
    """Token mode, several requests at a time: what it drafts is kept in part, and counted."""
    flags = ("--model-path", str(DEMO / "draft"), *PARSE, "--parse-verification", "token", *SEED)
    prompts = [*random_prompts(2, seed=5), *(one.prompt for one in held_out(4))]
    with plugin("toy_source", TOY_SOURCE=str(ROOT / "docs" / "development.md")):
        for client in served(start_server, "toy-source", *flags):
            answers = client.generate_all(prompts, 6, max_new_tokens=60)
            client.assert_nothing_lost()
    for answer, wanted in zip(
        answers, small_plain.generate_all(prompts, 6, max_new_tokens=60), strict=True
    ):
        assert_same(answer, wanted)
    counts = [parse_info(answer)["sources"].get("echo") for answer in answers]
    drafted = sum(one["drafted_tokens"] for one in counts if one)
    assert 0 < sum(one["accepted_tokens"] for one in counts if one) < drafted
