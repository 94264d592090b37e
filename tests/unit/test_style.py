"""Checks that no linter does: facts that are stated once, and module maps that match the files."""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.phases import Action
from sglang_parse.core.policy.constants import PolicyConfig

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "sglang_parse"
PROGRAMS = (
    *("bench/", "calibrate/", "compare/", "doctor/", "explain/", "models/", "roofline/"),
    *("train_judge/", "trial/"),
)
PACKAGE_FILES = sorted(PACKAGE.rglob("*.py"))
SOURCES = sorted(
    path for folder in ("sglang_parse", "patches") for path in ROOT.glob(f"{folder}/**/*.py")
)


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")), clean=False) or ""


def string_values(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yields string constants except docstrings, which may name a version."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in docstrings:
            yield node


def test_the_entry_point_is_the_plugin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["sglang.srt.plugins"] == {
        "parse": "sglang_parse.plugin:register"
    }


def test_only_pyproject_names_the_sglang_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [pin] = [text for text in project["dependencies"] if text.startswith("sglang")]
    name, version = pin.split("==")
    assert (name, bool(re.fullmatch(r"[0-9.]+", version))) == ("sglang", True)
    literals = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        for node in string_values(ast.parse(path.read_text(encoding="utf-8")))
        if version in node.value
    ]
    assert literals == []


STATE_WRITE = re.compile(
    r"(?:parse_state|\bstate)\.(?!notes\b)[\w.]+(?:\[.*\])? *"
    r"(?:[-+|&]?=(?!=)|\.(?:append|extend|clear|pop|update)\()"
)


def test_only_the_request_module_changes_a_requests_phase_and_kv():
    assert STATE_WRITE.search("req.parse_state.draft.finished = True")
    assert STATE_WRITE.search("state.committed += 1")
    assert not STATE_WRITE.search("if state.phase == Phase.PLAIN:")
    assert not STATE_WRITE.search("state.notes.grammar = walk")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in SOURCES
        if path != PACKAGE / "core" / "request.py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if STATE_WRITE.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    "package", ["core", "core/policy", "engine", "engine/drafting", "engine/sources"]
)
def test_a_package_docstring_lists_its_modules(package: str):
    """Each on its own line: indent, name, at least two spaces, description."""
    folder = PACKAGE / package
    listed = re.findall(r"^ {4}(\w+) {2,}\S", docstring(folder / "__init__.py"), re.MULTILINE)
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    assert sorted(listed) == sorted(modules | packages)


def test_core_names_its_modules_that_import_pytorch():
    (sentence,) = re.findall(r"Only (.*?) import PyTorch", docstring(PACKAGE / "core/__init__.py"))
    importing = {
        path.stem
        for path in (PACKAGE / "core").rglob("*.py")
        if re.search(r"^\s*(?:import|from) torch\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert set(re.findall(r"``(\w+)``", sentence)) == importing


def test_the_step_is_read_at_once():
    """One iteration, plan to commit, fits on four screens."""
    assert len((PACKAGE / "engine" / "step.py").read_text().splitlines()) <= 180


def test_the_policy_keeps_its_budget():
    """Lines of code, without docstrings and blank lines; constants that somebody has to know."""
    sources = [path.read_text() for path in (PACKAGE / "core/policy").glob("*.py")]
    assert sum(map(lines_of_code, sources)) <= 600
    assert len(fields(PolicyConfig)) <= 25


MAX_FILE_LINES = 350
LONGER_FILES = {
    "core/config.py",
    "core/policy/controller.py",
}


def test_the_package_keeps_its_budget():
    """Lines of Python and flags, by CHANGELOG's section "Size": the only place where they grow, by
    a row that names what for."""
    size = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("### Size\n")[2]
    size = size.partition("\n### ")[0].replace(",", "")
    lines, flags = map(int, re.findall(r"\*\*(\d+)\*\*", size))
    assert lines == sum(map(int, re.findall(r"\| ([+-]?\d+) \|$", size, re.MULTILINE)))
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES) <= lines
    assert len(ParseConfig.model_fields) <= flags


@cache
def package_nodes() -> list[ast.AST]:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE_FILES)
    return [node for tree in trees for node in ast.walk(tree)]


FUNCTION_LINES = 40
LONG_KERNEL = "attend_part"
"""Triton compiles a kernel as one function; parts of it would be functions of ten arguments."""


def test_functions_are_read_at_once():
    """From the first statement to the last, without signature and docstring."""
    functions = (node for node in package_nodes() if isinstance(node, ast.FunctionDef))
    found = set()
    for function in functions:
        body = function.body[ast.get_docstring(function) is not None :]
        if body and body[-1].end_lineno - body[0].lineno >= FUNCTION_LINES:
            found.add(function.name)
    assert found == {LONG_KERNEL}


WORDS = {
    # Learns from what happened; telemetry counts and samples.
    r"observe\w*": (
        "core/policy/",
        "core/copies.py",
        "core/arming.py",
        "core/doubt.py",
        "core/proposals.py",
        "core/eagle_gate.py",
        "engine/sources/",
        "engine/judge/",
    )
    + ("engine/parts.py",),
    # Reads a file, a command line or text that somebody wrote; results of forwards are taken.
    r"read(_\w+)?": ("core/", "startup/", *PROGRAMS, "client/", "shapes/", "tasks/")
    + ("engine/sources/endpoint_client.py",),
}
"""Names of methods and functions -> where they may be defined: one word, one meaning."""


def test_a_word_means_one_thing():
    defined = [
        (node.name, str(path.relative_to(PACKAGE)))
        for path in PACKAGE_FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    ]
    for word, places in WORDS.items():
        found = {place for name, place in defined if re.fullmatch(word, name.lstrip("_"))}
        assert {place for place in found if not place.startswith(places)} == set()


def test_a_head_is_an_eagle_head():
    """What scores draft tokens for verdicts is a scorer; verdict heads are its files."""
    for path in (PACKAGE / "engine" / "judge").glob("*.py"):
        names = {
            getattr(node, "id", getattr(node, "attr", getattr(node, "arg", "")))
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        }
        assert not {"head", "has_head", "Head"} & names


RECORDS = {
    *("engine/forward.py", "engine/row_results.py", "engine/verify.py"),
    *("engine/judge/judge.py", "core/round.py", "core/selection.py", "engine/commit.py"),
}
"""Modules between a target forward's logits and output tokens."""


def test_the_way_from_logits_to_tokens_is_short():
    """Records on it: rows, what they say, a forward in flight, one request's result, verdicts and
    the round. None is mutable."""
    found = [
        (node.name, [ast.unparse(one) for one in node.decorator_list])
        for path in sorted(RECORDS)
        for node in ast.walk(ast.parse((PACKAGE / path).read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    ]
    records = {name for name, how in found if any("dataclass" in one for one in how)}
    assert records == {
        *("RequestRows", "ForwardOutput", "RowResults", "TargetResult", "Verdicts", "Round")
    }
    assert all("frozen=True" in one for name, how in found if name in records for one in how)
    assert len(Action) <= 6


def test_the_chain_names_no_source():
    chain = (PACKAGE / "engine" / "sources" / "chain.py").read_text(encoding="utf-8")
    assert set(re.findall(r"engine\.sources\.(\w+)", chain)) == {"source"}
    assert "core.phases" not in chain  # which has the names


def test_no_class_has_the_name_of_another():
    names = Counter(node.name for node in package_nodes() if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} == set()


def test_a_call_names_its_arguments_one_by_one():
    """No star over a literal: it hides which parameter gets what, from readers and from mypy."""
    found = {
        ast.unparse(node)
        for node in package_nodes()
        if isinstance(node, ast.Call)
        for given in node.args
        if isinstance(given, ast.Starred) and isinstance(given.value, ast.Tuple | ast.List)
    }
    assert found == set()


def test_a_row_is_no_index_of_a_request():
    """Rows are those of a forward and of its logits; a batch's requests have an index."""
    found = {
        ast.unparse(node)
        for node in package_nodes()
        if isinstance(node, ast.Subscript)
        and ast.unparse(node.value).endswith("reqs")
        and "row" in ast.unparse(node.slice)
    }
    assert found == set()


def test_files_are_short():
    """A longer one is on the list until it has been split; then it is taken off."""
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE_FILES
        if len(path.read_text(encoding="utf-8").splitlines()) > MAX_FILE_LINES
    }
    assert found == LONGER_FILES


def lines_of_code(source: str) -> int:
    documented = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    lines = enumerate(source.splitlines(), start=1)
    return sum(bool(line.strip()) and number not in documented for number, line in lines)
