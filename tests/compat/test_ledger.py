"""The patch ledger: one entry per patch, one file per patch, every field filled in."""

import pkgutil
import re
from pathlib import Path

import generate
import pytest

from sglang_parse import context
from sglang_parse.patches import PATCHES, parse
from sglang_parse.patches.base import Patch

pytestmark = pytest.mark.compat

PATCH_FOLDER = Path(__file__).resolve().parents[2] / "patches"
FIELDS = ("Target", "SGLang versions", "Why", "How", "Upstream", "Removed when")


def test_registered_patches_and_files_are_the_same():
    names = [patch.name for patch in PATCHES]
    files = {path.stem for path in PATCH_FOLDER.glob("*/*.py")} - {"__init__"}
    assert len(names) == len(set(names))
    assert sorted(names) == sorted(files)


def test_the_ledger_has_every_field_of_every_patch():
    assert not generate.outdated(generate.PATCH_PAGES), "out of date; fix: run `make generate`"
    written = (PATCH_FOLDER / "README.md").read_text(encoding="utf-8")
    headings = [line[4:] for line in written.splitlines() if line.startswith("### ")]
    assert headings == [patch.name for patch in PATCHES]
    for field in FIELDS:
        assert written.count(f"\n- {field}:") == len(PATCHES)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_every_entry_is_complete(patch: Patch):
    assert patch.changes
    for text in (patch.why, patch.how, patch.upstream, patch.removed_when):
        assert text.strip() == " ".join(text.split())
        assert text


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_the_entry_names_what_the_file_changes(patch: Patch):
    """The file names every attribute of the entry's target, and it exists upstream."""
    (path,) = PATCH_FOLDER.glob(f"*/{patch.name}.py")
    source = path.read_text(encoding="utf-8")
    for name in patch.changes:
        pkgutil.resolve_name(name)
        assert name.rpartition(".")[2] in source


def test_the_order_of_calls_names_every_patch():
    """``context`` lists what SGLang calls; a CPU's patches are not called in order."""
    named = re.findall(r"patches/(\w+/\w+\.py)", context.__doc__ or "")
    assert [name for name in named if not (PATCH_FOLDER / name).is_file()] == []
    assert sorted(name for name in named if name.startswith("parse/")) == sorted(
        f"parse/{patch.name}.py" for patch in parse.PATCHES
    )
