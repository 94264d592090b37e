"""The README is true: its tables, its file map, and every command and program in it.

``PYTHONPATH=tests python tests/e2e/test_readme.py`` writes the generated tables and the file map
anew; texts of files that are already in the map are kept.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from sglang_parse import cli
from sglang_parse.bench.demo import servers
from sglang_parse.bench.demo.figures import Check, make_figures
from sglang_parse.bench.demo.records import Answer, Leg
from sglang_parse.bench.demo.report import report
from sglang_parse.bench.demo.servers import Server, ServerSpec, awake, free_ports
from sglang_parse.bench.demo.settings import Settings
from sglang_parse.bench.limit import limits
from sglang_parse.core import config
from sglang_parse.core.question import QuestionWording, built_in_questions
from sglang_parse.core.request import Stats
from sglang_parse.telemetry.metrics import METRICS, PREFIX
from support.warm import Nursery

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PORT = "30000"
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Who runs which block, told by a text that only this block has. A block of no line, or of two,
# fails `test_every_block_is_run_by_one_test`.
RUN_BY = {
    "make demo ": "test_make_targets_exist",
    "make compare ": "test_make_targets_exist",
    "make bench-kv ": "test_make_targets_exist",
    "make bench-gpu ": "test_make_targets_exist",
    "make soak ": "test_make_targets_exist",
    "make train-demo-pair ": "test_make_targets_exist",
    "-m sglang_parse.cli bench ": "test_bench",
    "-m sglang.launch_server": "server (fixture)",
    "30000/v1/chat/completions": "test_curl",
    "30000/metrics": "test_metrics",
    "openai.OpenAI(": "test_openai_program",
    "sgl.Engine(": "test_engine_program",
    "examples/frontend/": "test_frontend_programs",
    "AutoModelForCausalLM": "test_verdicts_computed_again",
}


def readme() -> str:
    return README.read_text(encoding="utf-8")


def blocks() -> list[str]:
    return [text for _, text in BLOCK.findall(readme())]


def find_block(mark: str) -> str:
    (block,) = [text for text in blocks() if mark in text]
    return block


def marked(name: str) -> str:
    """Text between ``<!-- name -->`` and ``<!-- /name -->``."""
    return readme().partition(f"<!-- {name} -->\n")[2].partition(f"<!-- /{name} -->")[0]


# -- tables ---------------------------------------------------------------------


NO_VALUE = {"question": "built in", "eagle3_path": "none"}


def flags_table() -> str:
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    for setting in config.settings_of(config.ParseConfig):
        name, default = config.flag(setting.name), setting.default
        shown = f"`{default}`" if default != "" else NO_VALUE[setting.name]
        rows.append(f"| `{name}` | {shown} | {setting.description} |")
    return "\n".join(rows) + "\n"


def test_flags_table_equals_the_settings():
    assert marked("flags") == flags_table()


def metrics_table() -> str:
    rows = ["| metric | own label | meaning |", "|---|---|---|"]
    for metric in METRICS:
        kind = "Histogram. " if metric.buckets else "Gauge. " if metric.is_gauge else ""
        label = f"`{metric.label}`" if metric.label else ""
        rows.append(f"| `{PREFIX}{metric.name}` | {label} | {kind}{metric.text} |")
    return "\n".join(rows) + "\n"


def test_metrics_table_equals_the_metrics():
    assert marked("metrics") == metrics_table()


def test_request_options_and_counters_are_documented():
    text = readme()
    for field in (*config.settings_of(config.RequestOptions), *fields(Stats)):
        assert f"`{field.name}`" in text


def listed(title: str) -> set[str]:
    """Names in the first column of the tables in a section of the README."""
    section = readme().partition(f"\n### {title}\n")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_recipes_and_questions_are_documented():
    assert listed("Recipes") == {f"examples/{p.name}" for p in ROOT.glob("examples/serve_*.sh")}
    keys = {field.name for field in fields(QuestionWording)}
    assert listed("The question") == keys | set(built_in_questions())


def test_trace_keys_are_documented():
    tree = ast.parse((ROOT / "sglang_parse" / "readout.py").read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    (function,) = [node for node in functions if node.name == "trace_record"]
    records = [node for node in ast.walk(function) if isinstance(node, ast.Dict)]
    keys = {ast.literal_eval(key) for record in records for key in record.keys if key}
    table = readme().partition("A record of `trace`:")[2].partition("So every verdict")[0]
    assert keys == set(re.findall(r"`(\w+)`(?=[^|]*\|[^|]*\|$)", table, re.MULTILINE))


def demo_keys(content: Any, path: str = "") -> Iterator[str]:
    """Dotted keys of a report, in the README's spelling."""
    if isinstance(content, list):
        content = content[0]
    if not isinstance(content, dict):
        yield path
        return
    for key, value in content.items():
        if path == "servers":
            key = "<server>"
        names = {"one": "<speed>", "concurrent": "<speed>"}
        names |= {"stages_one": "<stages>", "stages_concurrent": "<stages>"}
        if value is not None:
            yield from demo_keys(value, f"{path}.{names.get(key, key)}".lstrip("."))


def documented_keys(table: str) -> set[str]:
    found: set[str] = set()
    for line in marked(table).splitlines()[2:]:
        names = re.findall(r"`([^`]+)`", line.split("|")[1])
        parent = names[0].rpartition(".")[0]
        found.update(parent + name if name.startswith(".") else name for name in names)
    return found


def test_demo_json_keys_are_documented():
    counters = {"rounds": 1, "drafted_tokens": 9, "accepted_tokens": 8, "target_tokens": 1}
    stages = ("draft_ms", "verification_ms", "continuation_ms", "prefill_ms")
    answer = Answer(0, "", True, 10, 1.0, counters | dict.fromkeys(stages, 0.1))
    names = product(("plain", "draft", "parse"), (1, 8))
    legs = [Leg(name, 0, concurrency, 1.0, (answer,)) for name, concurrency in names]
    settings = Settings(ROOT, 2, 2, 1, 8, ROOT / "build" / "demo.json")
    content = json.loads(json.dumps(report(settings, make_figures(legs, 8), 1.0)))
    assert documented_keys("demo keys") == set(demo_keys(content))


# -- file map -------------------------------------------------------------------

# Folders of files that belong together and are described as one.
WHOLE_FOLDERS = tuple(f"examples/demo_pair/{name}/" for name in ("draft", "eagle3", "target"))


def files() -> list[str]:
    """Entries of the map: files that git tracks or would add, and whole folders."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listing.returncode:
        pytest.skip("not a git checkout: the file map has nothing to be compared with")
    names = {name for name in listing.stdout.decode().split("\0") if name}
    return sorted({_entry(name) for name in names if (ROOT / name).is_file()})


def _entry(name: str) -> str:
    return next((folder for folder in WHOLE_FOLDERS if name.startswith(folder)), name)


def mapped() -> dict[str, str]:
    """File -> text of the map."""
    lines = re.findall(r"^- `([^`]+)`(?:: (.*))?$", marked("file map"), re.MULTILINE)
    return dict(lines)


def test_file_map_equals_the_tree():
    assert sorted(mapped()) == files()
    assert [name for name, text in mapped().items() if not text] == []


def first_sentence(name: str) -> str:
    """What a Python file says about itself; "" for other files."""
    path = ROOT / name
    if path.suffix != ".py":
        return ""
    lines = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")
    return " ".join(lines[0].split()).rstrip(".")


def file_map() -> str:
    known = mapped()
    texts = {name: known.get(name) or first_sentence(name) for name in files()}
    return "".join(f"- `{name}`" + f": {text}\n" for name, text in texts.items())


# -- blocks ---------------------------------------------------------------------


@pytest.mark.parametrize("block", blocks(), ids=lambda text: text.split("\n")[0][:40])
def test_every_block_is_run_by_one_test(block: str):
    assert len([mark for mark in RUN_BY if mark in block]) == 1
    runner = RUN_BY[next(mark for mark in RUN_BY if mark in block)]
    assert runner.split()[0] in globals()


def test_every_runner_has_a_block():
    assert [mark for mark in RUN_BY if not any(mark in block for block in blocks())] == []


@pytest.mark.parametrize("mark", [mark for mark in RUN_BY if mark.startswith("make ")])
def test_make_targets_exist(mark: str):
    """They take minutes to hours, so only what they would do is asked for."""
    for line in find_block(mark).splitlines():
        words = shlex.split(line, comments=True)
        assert words[0] == "make"
        subprocess.run([*words, "--dry-run"], cwd=ROOT, capture_output=True, check=True)


def test_make_demo_runs_a_small_demo(
    tmp_path: Path, nursery: Nursery, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """The command behind `make demo`, with few problems: real servers, table, figures, trace."""
    monkeypatch.setattr(servers, "Server", partial(Server, start=nursery.start))
    monkeypatch.setattr(cli, "end_on_sigterm", lambda: None)
    output = tmp_path / "demo.json"
    flags = ["--problems", "6", "--accuracy-problems", "12", "--runs", "1", "--concurrency", "2"]
    assert cli.main(["demo", *flags, "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "PARSE" in printed
    figures = json.loads(output.read_text())
    assert {"servers", "limit", "checks"} <= set(figures)
    assert figures["servers"]["parse"]["accuracy"] >= 0.8
    assert figures["limit"]["limit"] > 1


def test_bench(
    tmp_path: Path, nursery: Nursery, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """Tiny shapes without weights: real servers, and the share that was asked for is kept."""
    monkeypatch.setattr(servers, "Server", partial(Server, start=nursery.start))
    monkeypatch.setattr(cli, "end_on_sigterm", lambda: None)
    monkeypatch.setattr(limits, "MIN_SECONDS", 0.05)
    words = shlex.split(find_block("-m sglang_parse.cli bench ").replace("\\\n", " "))
    assert cli.main([*words[3:], "--output", str(tmp_path)]) == 0
    assert "simulated acceptance" in capsys.readouterr().out
    content = json.loads((tmp_path / "results.json").read_text())
    one, two = content["speeds"]
    for row in (one, two):  # 32 tokens behind the first: all drafted, half of them kept
        assert (row["kept"], row["drafted"]) == pytest.approx((16 / 33, 32 / 33), abs=1e-3)
        cost = row["r"] + row["v"] + 0.5
        assert row["limit"] == pytest.approx(1 / cost, rel=1e-3)
        assert row["ratio"] == pytest.approx(row["share_of_limit"] * row["limit"], rel=1e-3)
    judged = content["pass"]
    assert judged["rows"] == 1 + 32 + 16 * judged["question_tokens"]
    assert 0 < judged["prefill_ms"] < judged["ms"]
    log = (tmp_path / "logs" / "parse-0.5.log").read_text()
    assert "PARSE: acceptance is simulated (SGLANG_PARSE_SIMULATE_ACCEPTANCE=0.5)" in log
    assert "simulated acceptance" in (tmp_path / "bench.html").read_text()
    assert_bench_keys_are_documented(content)


def assert_bench_keys_are_documented(content: dict[str, Any]) -> None:
    conditions = content.pop("conditions")
    assert content["checks"] == []  # they are an H200's
    content["checks"] = [asdict(Check("", 0.0, "", reached=False))]
    keys = {f"conditions.{key}" for key in conditions} | set(demo_keys(content))
    assert documented_keys("bench keys") == keys


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The README's own server, flag by flag; only the port differs, as 30000 may be taken, and it
    drafts even where a busy machine makes that slow."""
    words = shlex.split(find_block("-m sglang.launch_server").replace("\\\n", " "))
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    (port,) = free_ports(1)
    flags = tuple(str(ROOT / word) if word.startswith("examples/") else word for word in words[3:])
    place = flags.index("--port")
    assert flags[place + 1] == PORT
    flags = (*flags[:place], *flags[place + 2 :], "--parse-drafting", "always")
    spec = ServerSpec("readme", flags, common=())
    server = Server(spec, port, tmp_path_factory.mktemp("readme") / "server.log")
    try:
        server.wait_ready()
        server.suspend()
        yield server
    finally:
        server.stop()


def run(server: Server, command: list[str], limit_s: float) -> str:
    """Standard output of a program that must succeed, run in the repository's root."""
    command = [word.replace(PORT, str(server.port)) for word in command]
    with awake(server):
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_curl(server: Server):
    answer = json.loads(run(server, ["bash", "-c", find_block("30000/v1/chat/completions")], 120))
    (choice,) = answer["choices"]
    assert choice["message"]["content"]
    assert choice["meta_info"]["parse"][0]["mode"] == "parse"


def test_metrics(server: Server):
    printed = run(server, ["bash", "-c", find_block("30000/metrics")], 120)
    for metric in METRICS:
        assert PREFIX + metric.name in printed or metric.is_gauge or not metric.label_values


def test_openai_program(server: Server):
    printed = run(server, [sys.executable, "-c", find_block("openai.OpenAI(")], 120)
    assert "'mode': 'parse'" in printed
    assert "'reason': 'switched off'" in printed


def test_frontend_programs(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    """The first one as a command, the others in this process, which imports SGLang once."""
    said = {
        "gen": "'mode': 'parse'",
        "fork": "most: [('Answer: ",
        "multi_turn": "tokens from the cache",
        "choose": "wrong: no",
        "constrained": "plain: grammar",
    }
    lines = [shlex.split(x, comments=True) for x in find_block("examples/frontend/").splitlines()]
    assert {Path(path).stem for _, path, _ in lines} == set(said)
    assert set(said) == {path.stem for path in (ROOT / "examples" / "frontend").glob("*.py")}
    (_, first, url), *others = lines
    assert said[Path(first).stem] in run(server, [sys.executable, first, url], 240)
    for _, path, url in others:
        monkeypatch.setattr(sys, "argv", [path, url.replace(PORT, str(server.port))])
        with awake(server):
            runpy.run_path(str(ROOT / path), run_name="__main__")
        assert said[Path(path).stem] in capsys.readouterr().out


def test_verdicts_computed_again(server: Server, tmp_path: Path, capsys: Any):
    program = tmp_path / "verdicts.py"
    program.write_text(find_block("AutoModelForCausalLM").replace(PORT, str(server.port)))
    with contextlib.chdir(ROOT), awake(server):
        runpy.run_path(str(program), run_name="__main__")
    assert "prefix of" in capsys.readouterr().out


def test_engine_program(tmp_path: Path, nursery: Nursery):
    # A file, because the engine's processes import the main program again.
    program, printed = tmp_path / "engine.py", tmp_path / "printed"
    program.write_text(find_block("sgl.Engine("), encoding="utf-8")
    environment = {**servers.DEFAULTS, **os.environ, **servers.ENVIRONMENT}
    with printed.open("wb") as output:
        process = nursery.start([sys.executable, str(program)], environment, output)
    assert process.wait(600) == 0, printed.read_text()
    assert "'mode': 'parse'" in printed.read_text()


def write_tables() -> None:
    """Renew what can be generated."""
    tables = {"flags": flags_table(), "metrics": metrics_table(), "file map": file_map()}
    for name, text in tables.items():
        before, start, rest = readme().partition(f"<!-- {name} -->\n")
        after = rest.partition(f"<!-- /{name} -->")[2]
        README.write_text(f"{before}{start}{text}<!-- /{name} -->{after}", encoding="utf-8")


if __name__ == "__main__":
    write_tables()
