"""The patch ledger is true: one entry per patch, one file per patch, every field filled in."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.seams

PATCH_FOLDER = Path(__file__).resolve().parents[2] / "patches"
NOT_PATCHES = {"__init__"}
FIELDS = ("Target", "SGLang versions", "Why", "How", "Upstream", "Removed when")


def ledger() -> dict[str, str]:
    """Entry text by patch id."""
    text = (PATCH_FOLDER / "README.md").read_text(encoding="utf-8")
    _, *parts = re.split(r"^## (\S+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_ledger_registered_patches_and_files_are_the_same():
    from sglang_parse.patches import PATCHES

    names = [patch.name for patch in PATCHES]
    files = {path.stem for path in PATCH_FOLDER.glob("*/*.py")} - NOT_PATCHES
    assert len(names) == len(set(names))
    assert sorted(names) == sorted(files) == sorted(ledger())


@pytest.mark.parametrize("patch_id", sorted(ledger()))
def test_every_entry_says_all_there_is_to_say(patch_id):
    entry = ledger()[patch_id]
    found = re.findall(r"^- ([^:]+): *\S", entry, flags=re.MULTILINE)
    assert found == list(FIELDS)


@pytest.mark.parametrize("patch_id", sorted(ledger()))
def test_the_entry_names_what_the_file_changes(patch_id):
    """Every attribute in the entry's target is one the file names, and it exists upstream."""
    import pkgutil

    (path,) = PATCH_FOLDER.glob(f"*/{patch_id}.py")
    source = path.read_text(encoding="utf-8")
    target = re.search(r"^- Target:(.*?)^- ", ledger()[patch_id], re.MULTILINE | re.DOTALL)
    paths = [name for name in re.findall(r"`([^`]+)`", target.group(1)) if "." in name]
    assert paths
    for name in paths:
        pkgutil.resolve_name(name)
        assert name.rpartition(".")[2] in source
