"""The table of tests that a change can break, and the stand-ins of the second tier."""

from __future__ import annotations

import ast
from fnmatch import fnmatch
from pathlib import Path

import pytest
from affected import AFFECTED, E2E, ROOT, affected_by

FILES = sorted(E2E.glob("test_*.py"))


def tracked(*folders: str) -> list[str]:
    return [
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if "__pycache__" not in path.parts
    ]


def test_every_module_affects_a_test():
    sources = tracked("sglang_parse", "patches")
    assert [path for path in sources if not affected_by(path)] == []


def test_every_row_is_needed_and_names_what_exists():
    paths = tracked("sglang_parse", "patches", "tests", "examples", "docs")
    paths += ["README.md", "patches/README.md"]
    assert [row for row in AFFECTED if not any(fnmatch(path, row) for path in paths)] == []
    named = {f"test_{name}.py" for names in AFFECTED.values() for name in names.split()}
    assert named == {path.name for path in FILES}


# -- the other tiers --------------------------------------------------------------------


def stand_ins(path: Path) -> list[str]:
    """Those that the marks of a file name, themselves or by a constant."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    constants = {
        ast.unparse(node.targets[0]): node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    return [
        constants.get(ast.unparse(node.args[0]), node.args[0]).value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("nightly", "weekly")
    ]


MARKS = ("pytest.mark.nightly", "pytest.mark.weekly")


def is_marked(node: ast.FunctionDef) -> bool:
    """Whether a test is, not some of its parameters."""
    return any(ast.unparse(one).startswith(MARKS) for one in node.decorator_list)


def has_fast_test(path: Path, name: str) -> bool:
    """Whether a file has a test of that name ("": any) in the first tier."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    marks = tuple(f"pytestmark = {mark}" for mark in MARKS)
    if any(ast.unparse(node).startswith(marks) for node in tree.body):
        return False
    return any(
        isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and node.name == (name or node.name)
        and not is_marked(node)
        for node in tree.body
    )


@pytest.mark.parametrize("path", [path for path in FILES if stand_ins(path)], ids=lambda p: p.stem)
def test_the_other_tiers_name_fast_tests(path: Path):
    for stand_in in stand_ins(path):
        file, _, name = stand_in.partition("::")
        assert has_fast_test(ROOT / file, name), f"{stand_in} is no test of the first tier"
