"""The patch ledger is true: one entry per patch, one file per patch, every field filled in."""

import pkgutil
from pathlib import Path

import pytest

from sglang_parse.patches import PATCHES, ledger
from sglang_parse.patches.base import Patch

pytestmark = pytest.mark.seams

PATCH_FOLDER = Path(__file__).resolve().parents[2] / "patches"
FIELDS = ("Target", "SGLang versions", "Why", "How", "Upstream", "Removed when")
COMMAND = "python -m sglang_parse.patches.ledger > patches/README.md"


def test_registered_patches_and_files_are_the_same():
    names = [patch.name for patch in PATCHES]
    files = {path.stem for path in PATCH_FOLDER.glob("*/*.py")} - {"__init__"}
    assert len(names) == len(set(names))
    assert sorted(names) == sorted(files)


def test_the_ledger_is_what_the_patches_say():
    written = (PATCH_FOLDER / "README.md").read_text(encoding="utf-8")
    assert written == ledger.render(), f"patches/README.md is out of date; renew it: {COMMAND}"
    headings = [line[4:] for line in written.splitlines() if line.startswith("### ")]
    assert headings == [patch.name for patch in PATCHES]
    for field in FIELDS:
        assert written.count(f"\n- {field}:") == len(PATCHES)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_every_entry_says_all_there_is_to_say(patch: Patch):
    assert patch.changes
    for text in (patch.why, patch.how, patch.upstream, patch.removed_when):
        assert text.strip() == " ".join(text.split())
        assert text


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_the_entry_names_what_the_file_changes(patch: Patch):
    """Every attribute in the entry's target is one the file names, and it exists upstream."""
    (path,) = PATCH_FOLDER.glob(f"*/{patch.name}.py")
    source = path.read_text(encoding="utf-8")
    for name in patch.changes:
        pkgutil.resolve_name(name)
        assert name.rpartition(".")[2] in source
