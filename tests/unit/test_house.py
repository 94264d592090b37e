"""Rules of the house that neither reading nor a linter keeps: one fact in one place."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path for room in ("sglang_parse", "patches") for path in ROOT.glob(f"{room}/**/*.py")
)


def string_values(tree: ast.Module) -> Iterator[ast.Constant]:
    """Texts a program uses; a docstring may say on which version a fact was checked."""
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


def test_the_sglang_version_is_written_in_pyproject_only():
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
    r"(?:parse_state|\bstate)\.[\w.]+(?:\[.*\])? *"
    r"(?:[-+|&]?=(?!=)|\.(?:append|extend|clear|pop|update)\()"
)


def test_a_requests_state_changes_in_its_own_module_only():
    """Everywhere else it is read, or asked to change."""
    assert STATE_WRITE.search("req.parse_state.stats.rounds += 1")
    assert not STATE_WRITE.search("if state.phase == Phase.PLAIN:")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in SOURCES
        if path != ROOT / "sglang_parse" / "core" / "request.py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if STATE_WRITE.search(line)
    ]
    assert found == []
