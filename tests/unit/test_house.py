"""Rules of the house that reading alone does not keep: who imports whom, one fact in one place."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "sglang_parse"
CORE = (
    "segment",
    "question",
    "layout",
    "mask",
    "selection",
    "reference",
    "phases",
    "config",
    "simulation",
)
CORE_MAY_IMPORT = {"torch", "sglang_parse", *sys.stdlib_module_names}
WORKPLACE_PATH = re.compile(r"(?<![\w./-])/(?:work|tmp/bash_jobs)(?![\w-])")


def imported(path: Path) -> set[str]:
    """Every module a file imports, anywhere in it; ``from a import b`` gives a and a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "sglang_parse" if node.level else node.module
            module = f"{base}.{node.module}" if node.level and node.module else base
            names.update({module, *(f"{module}.{alias.name}" for alias in node.names)})
    return names


def string_values(tree: ast.Module) -> Iterator[ast.Constant]:
    """Texts a program uses; a docstring may say on which version a fact was checked."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in docstrings:
            yield node


def product_files() -> list[Path]:
    """Python files that run in a server or that a person runs; tests may import what they like."""
    folders = [PACKAGE, ROOT / "patches", ROOT / "examples"]
    return [path for folder in folders for path in sorted(folder.rglob("*.py"))]


def tracked_texts() -> Iterator[tuple[str, str]]:
    """(path, text) of every file git tracks that is text."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in listing.stdout.decode().split("\0"):
        path = ROOT / name
        if not path.is_file():
            continue
        content = path.read_bytes()
        if b"\0" not in content:
            yield name, content.decode("utf-8")


# The package's own __init__ runs before every core module.
@pytest.mark.parametrize("module", ["__init__", *CORE])
def test_core_imports_torch_the_standard_library_and_core_only(module):
    names = imported(PACKAGE / f"{module}.py")
    assert {name.split(".")[0] for name in names} <= CORE_MAY_IMPORT
    siblings = {name.split(".")[1] for name in names if name.startswith("sglang_parse.")}
    assert siblings <= set(CORE)


def test_nobody_imports_the_plugin():
    importers = [path for path in product_files() if "sglang_parse.plugin" in imported(path)]
    assert importers == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["sglang.srt.plugins"] == {
        "parse": "sglang_parse.plugin:register"
    }


def test_every_package_is_installed():
    """``pip install .`` takes what pyproject lists; an editable install takes everything."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = [".".join(path.parent.relative_to(ROOT).parts) for path in PACKAGE.rglob("__init__.py")]
    assert sorted(listed) == sorted([*found, "sglang_parse.patches"])


def test_the_sglang_version_is_written_in_pyproject_only():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [pin] = [text for text in project["dependencies"] if text.startswith("sglang")]
    name, version = pin.split("==")
    assert (name, bool(re.fullmatch(r"[0-9.]+", version))) == ("sglang", True)
    literals = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in string_values(ast.parse(path.read_text(encoding="utf-8")))
        if version in node.value
    ]
    assert literals == []


@pytest.mark.parametrize("folder", ["wo_rk", "tmp/bash__jobs"])
def test_the_search_for_workplace_paths_works(folder):
    path = "/" + folder.replace("_", "", 1)  # not in one piece here, or this file would be found
    for text in (f"cd {path}/main", f'"{path}"', f"={path}", f"{path}.0/x"):
        assert WORKPLACE_PATH.search(text)
    for text in (f"a{path}/b", f".{path}", f"{path}shop", f"{path}-flow"):
        assert not WORKPLACE_PATH.search(text)


def test_no_tracked_file_names_a_path_of_the_workplace():
    named = [
        f"{name}:{number}"
        for name, text in tracked_texts()
        for number, line in enumerate(text.splitlines(), 1)
        if WORKPLACE_PATH.search(line)
    ]
    assert named == []
