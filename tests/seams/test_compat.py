"""The version pin and the table of upstream seams, against the installed SGLang."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from sglang_parse import patches
from sglang_parse.startup import compat
from sglang_parse.startup.compat import CompatError
from sglang_parse.startup.seams import BACKEND_SEAMS, PROGRAM_SEAMS, SEAMS, Seam

pytestmark = pytest.mark.seams

PACKAGE = Path(__file__).resolve().parents[2] / "sglang_parse"
FILES = [*PACKAGE.rglob("*.py"), *(PACKAGE / "patches").rglob("*.py")]  # a link is not followed
SOURCES = {path: path.read_text(encoding="utf-8") for path in FILES if path.stem != "seams"}
TABLE = [*SEAMS, *PROGRAM_SEAMS, *(seam for seams in BACKEND_SEAMS.values() for seam in seams)]
PATCHED = {target for patch in patches.PATCHES for target in patch.targets}


def imported(source: str) -> set[str]:
    """Dotted paths of what a file imports from SGLang."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {path for path in found if path.startswith("sglang.")}


def names(source: str) -> Iterator[str]:
    """Names, attributes, functions, imports and the parts of dotted texts of a file."""
    for node in ast.walk(ast.parse(source)):
        for field in ("id", "attr", "name", "arg"):
            if isinstance(name := getattr(node, field, None), str):
                yield name
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"\w+(?=\.|$)", node.value) if " " not in node.value else ()


def is_module(path: str) -> bool:
    try:
        return find_spec(path) is not None
    except ModuleNotFoundError:
        return False


IMPORTED = set().union(*map(imported, SOURCES.values()))


def test_every_name_imported_from_sglang_is_in_the_table_or_patched():
    """A module is there by what is used of it, a patched class by what is changed of it."""
    assert len(IMPORTED) > 60
    known = {*(seam.path for seam in TABLE), *PATCHED}
    missing = []
    for path in sorted(IMPORTED - known):
        entries = known if is_module(path) else PATCHED
        if not any(entry.startswith(f"{path}.") for entry in entries):
            missing.append(path)
    assert missing == []


def test_nothing_is_in_the_table_twice_or_patched_as_well():
    counts = Counter([seam.path for seam in TABLE] + sorted(PATCHED))
    assert [path for path, count in counts.items() if count > 1] == []


def test_everything_in_the_table_is_used():
    """What is reached through an object is at least named somewhere."""
    used = set().union(*map(names, SOURCES.values()))
    unused = [
        seam.path
        for seam in TABLE
        if seam.path not in IMPORTED and (seam.through or seam.path.rpartition(".")[2]) not in used
    ]
    assert unused == []


def test_installed_sglang_has_every_seam():
    compat.check()


def test_installed_sglang_has_everything_that_patches_change():
    """All of it, also what this machine does not need."""
    compat.check([seam for patch in patches.PATCHES for seam in patch.seams])


@pytest.mark.parametrize("backend", ["torch_native", "flashinfer", "triton"])
def test_installed_sglang_has_every_seam_of(backend: str):
    compat.check_backend(backend)  # fa3's module wants a GPU's libraries


def test_another_version_is_refused_with_found_expected_and_fix(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda _: "0.4.0")
    with pytest.raises(CompatError, match=r"found SGLang 0\.4\.0, expected .*Fix: pip install"):
        compat.check_version()


def test_missing_attribute_is_refused_by_name():
    seam = Seam("sglang.srt.speculative.spec_info.NoSuchThing", (), "is a test")
    with pytest.raises(CompatError, match=r"NoSuchThing: found nothing .* is a test"):
        compat.check_seams([seam])


def test_other_parameters_are_refused_with_both_lists():
    seam = Seam("sglang.srt.mem_cache.allocation.alloc_token_slots", ("num_slots",), "is a test")
    with pytest.raises(CompatError, match=r"num_tokens.*expected \['num_slots'\]"):
        compat.check_seams([seam])


def test_the_start_refuses_a_patch_whose_target_is_gone(monkeypatch):
    from sglang_parse.plugin import validate_server_args

    patch = replace(patches.PATCHES[0], targets={"sglang.srt.no_such_thing": ()})
    monkeypatch.setattr(patches, "PATCHES", (patch,))
    text = f"no_such_thing: found nothing .* is changed by the patch {patch.name}"
    with pytest.raises(CompatError, match=text):
        validate_server_args(None)


def test_pin_is_an_exact_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", compat.pinned_version())
