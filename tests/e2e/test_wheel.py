"""The wheel, installed without a checkout: every command, a server, and no other files.

It is built as a release is, by way of an sdist, and installed into a second environment that shares
the packages of this one. All runs from an empty folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from zipfile import ZipFile

import pytest

from sglang_parse.client.servers import (
    Process,
    Server,
    ServerSpec,
    free_ports,
    start_process,
)
from sglang_parse.core.question import built_in_questions
from sglang_parse.explain.run import as_json
from support.chat_families import FAMILIES
from support.client import Client, parse_info, random_prompts
from support.demo_pair import DEMO
from support.random_pair import make_pair
from support.servers import parse_flags
from support.traces import record, traced

ROOT = Path(__file__).resolve().parents[2]
OURS = "sglang_parse"
NOT_SOURCES = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
LEDGER = f"{OURS}/patches/README.md"
"""Files for readers of the repository, which no program uses."""
COMMANDS = ("demo", "bench", "load", "compare")
NEED_THE_PAIR = {
    name: ("--device", "cpu", "--target", "tiny_target", "--draft", "tiny_draft")
    if name == "bench"
    else ()
    for name in COMMANDS
}
"""Flags with which a command needs only the demo pair."""
SEEN_FROM_INSIDE = f"""
import json
from importlib.metadata import distributions, entry_points
from importlib.util import find_spec
import {OURS}
from {OURS}.core.question import QuestionWording, BUILT_IN, built_in_questions
print(json.dumps(dict(
    package={OURS}.__file__,
    patches=find_spec("{OURS}.patches").origin,
    installed=[str(d.locate_file("")) for d in distributions() if d.name == "sglang-parse"],
    plugins=[plugin.value for plugin in entry_points(group="sglang.srt.plugins")],
    questions=[
        name for name in built_in_questions() if QuestionWording.read(BUILT_IN / f"{{name}}.json")
    ],
)))
"""


EACH = f"""
import contextlib, io, json, sys
from {OURS} import cli

results = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        with contextlib.redirect_stderr(io.StringIO()) as err:
            try:
                code = cli.main(words)
            except SystemExit as end:
                code = end.code
    results.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(results))
"""
"""Many commands in one process, which imports what they import once."""


def build(source: Path, folder: Path, *flags: str) -> Path:
    """Returns the wheel that ``python -m build`` writes to ``folder``."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, *flags, source]
    built = subprocess.run(command, capture_output=True, text=True, env=clean_environment())
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def contents(wheel: Path) -> dict[str, bytes]:
    with ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def clean_environment() -> dict[str, str]:
    """An empty folder, outside of the checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout with its links, because a build writes files next to the sources."""
    folder = tmp_path_factory.mktemp("sources") / "checkout"
    shutil.copytree(ROOT, folder, symlinks=True, ignore=NOT_SOURCES)
    return folder


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds an sdist, then the wheel from it."""
    return build(sources, tmp_path_factory.mktemp("released"))


# -- contents ---------------------------------------------------------------------------


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path):
    info = f"{OURS}-{wheel.name.split('-')[1]}.dist-info/"
    files = {name for name in contents(wheel) if not name.startswith(info)}
    tree = (
        Path(folder, name).relative_to(ROOT)
        for folder, _, names in os.walk(ROOT / OURS, followlinks=True)
        for name in names
    )
    assert files == {str(path) for path in tree if "__pycache__" not in path.parts} - {LEDGER}


def test_the_wheel_needs_no_sdist(wheel: Path, sources: Path, tmp_path: Path):
    assert contents(build(sources, tmp_path, "--wheel")) == contents(wheel)


# -- a second environment ---------------------------------------------------------------


@dataclass(frozen=True)
class Installation:
    """An environment with the wheel in it.

    Attributes:
        packages: its site-packages: ours, and links to those of the environment of the tests.
        elsewhere: an empty folder, where everything runs.
    """

    prefix: Path
    packages: Path
    elsewhere: Path

    @property
    def python(self) -> str:
        return str(self.prefix / "bin" / "python")

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs ``sglang-parse``, or a program of this environment's ``python``."""
        return subprocess.run(
            [str(self.prefix / "bin" / command[0]), *command[1:]],
            cwd=self.elsewhere,
            env=clean_environment(),
            capture_output=True,
            text=True,
        )

    def run_each(self, *commands: Sequence[str]) -> list[tuple[int, str, str]]:
        """``sglang-parse`` with each of these words: exit code, output, errors."""
        done = self.run("python", "-c", EACH, json.dumps(commands))
        assert done.returncode == 0, done.stderr
        return [tuple(found) for found in json.loads(done.stdout)]

    def start(self, command: Sequence[str], env: Mapping[str, str], output: IO[bytes]) -> Process:
        """``start_process`` with this environment's Python, in the empty folder."""
        there = ("env", "--chdir", str(self.elsewhere), self.python)
        clean = {name: value for name, value in env.items() if name != "PYTHONPATH"}
        return start_process([*there, *command[1:]], clean, output)

    @contextmanager
    def without(self, package: str) -> Iterator[None]:
        """Hides a package for the length of a block."""
        link = self.packages / package
        target = link.readlink()
        link.unlink()
        try:
            yield
        finally:
            link.symlink_to(target)


@pytest.fixture(scope="module")
def installation(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """Links packages, because a ``.pth`` file would also expose the editable install."""
    prefix = tmp_path_factory.mktemp("second") / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(prefix)], check=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(prefix)}))
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for path in Path(folder).iterdir():
            if OURS not in path.name:
                (packages / path.name).symlink_to(path)
    found = Installation(prefix, packages, tmp_path_factory.mktemp("elsewhere"))
    installed = found.run(
        "python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)
    )
    assert installed.returncode == 0, installed.stderr
    return found


@pytest.mark.nightly("tests/e2e/test_wheel.py::test_the_wheel_holds_the_package_and_nothing_else")
def test_the_second_environment_has_the_wheel_and_only_that(installation: Installation):
    done = installation.run("python", "-c", SEEN_FROM_INSIDE)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    assert seen["package"] == str(installation.packages / OURS / "__init__.py")
    assert seen["patches"] == str(installation.packages / OURS / "patches" / "__init__.py")
    assert seen["installed"] == [str(installation.packages)]
    assert seen["plugins"].count("sglang_parse.plugin:register") == 1
    assert seen["questions"] == built_in_questions()


@pytest.mark.nightly("tests/e2e/test_wheel.py::test_the_wheel_holds_the_package_and_nothing_else")
def test_help(installation: Installation):
    done = installation.run("sglang-parse", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: sglang-parse ")


@pytest.mark.nightly("tests/e2e/test_wheel.py::test_the_wheel_holds_the_package_and_nothing_else")
def test_every_command_in_an_empty_folder(installation: Installation):
    """Help; the place of the demo pair, where that is missing; and the doctor finds the plugin."""
    names = (*COMMANDS, "doctor", "explain", "models", "roofline", "try")
    helps, pairs = ((name, "--help") for name in names), NEED_THE_PAIR.items()
    missing = ((name, *flags) for name, flags in pairs)
    found = installation.run_each(*helps, *missing, ("doctor", "--json"))
    for name, (code, printed, errors) in zip(names, found, strict=False):
        assert (code, errors) == (0, "")
        assert printed.startswith(f"usage: sglang-parse {name} ")
    for name, (code, printed, errors) in zip(NEED_THE_PAIR, found[len(names) : -1], strict=True):
        assert (code, printed) == (1, "")
        (line,) = errors.splitlines()
        assert line.startswith(f"sglang-parse {name}: ")
        assert "a checkout of the repository" in line
    assert not any(installation.elsewhere.iterdir())
    code, printed, errors = found[-1]
    assert code == 0, errors
    checks = {line["check"]: line["status"] for line in json.loads(printed)["findings"]}
    assert checks == dict.fromkeys(("versions", "plugin", "patches"), "ok")


@pytest.mark.nightly("tests/e2e/test_wheel.py::test_the_wheel_holds_the_package_and_nothing_else")
def test_without_an_extra(installation: Installation, tmp_path: Path):
    """A command that needs it names the package; ``explain`` needs none, nor the demo pair."""
    answers, output = tmp_path / "answers.json", tmp_path / "page"
    answer = traced("Say a.", "abc\n", record(0, ["abc\n"], [0.9], 1))
    answers.write_text(json.dumps(as_json(answer)))
    flags = ("--tokenizer", str(DEMO / "target"), "--output", str(output))
    with installation.without("plotly"):
        compared, explained = installation.run_each(("compare",), ("explain", str(answers), *flags))
    missing = "plotly is not installed; fix: pip install 'sglang-parse[compare]'"
    assert compared == (1, "", f"sglang-parse compare: {missing}\n")
    assert explained[0] == 0, explained
    page = (output / "explain.html").read_text(encoding="utf-8")
    assert "Round 1: 4 draft tokens after output token" in page


# -- a server ---------------------------------------------------------------------------


@pytest.fixture
def server(installation: Installation, tmp_path: Path) -> Iterator[Server]:
    """PARSE with the default question."""
    pair = make_pair(tmp_path / "pair", tokenizer=FAMILIES["chatml"].tokenizer())
    (port,) = free_ports(1)
    spec = ServerSpec("wheel", parse_flags(pair))
    server = Server(spec, port, tmp_path / "server.log", installation.start)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop(0)


@pytest.mark.nightly("tests/e2e/test_wheel.py::test_the_wheel_holds_the_package_and_nothing_else")
def test_a_server_asks_the_built_in_question(server: Server):
    (prompt,) = random_prompts(1, seed=0)
    answer = Client(server.url).generate(prompt, max_new_tokens=48, ignore_eos=True)
    info = parse_info(answer)
    assert info["mode"] == "parse"
    assert info["drafted_tokens"] > 0
