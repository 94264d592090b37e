"""The version pin and the symbols that PARSE uses, against the installed SGLang."""

import re
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from sglang_parse import patches
from sglang_parse.patches.base import around
from sglang_parse.startup import compat
from sglang_parse.startup.compat import CompatError, Symbol
from support.sglang_symbols import (
    BACKEND_METHODS,
    METHODS,
    PACKAGE,
    backend_symbols,
    server_symbols,
    symbols_in,
)

pytestmark = pytest.mark.compat

MISSING = "sglang.srt.speculative.spec_info.NoSuchThing"


def scan(folder: Path, source: str) -> list[tuple]:
    """(path, keywords, number of positional arguments) of what a source file uses."""
    file = folder / "used.py"
    file.write_text(source)
    symbols = symbols_in([file])
    return [(symbol.path, symbol.keywords, symbol.num_positional) for symbol in symbols]


def test_imports_attributes_calls_and_super_calls_are_found(tmp_path: Path):
    found = scan(
        tmp_path,
        """
from sglang.a import f, Enum as E, Base
from torch import nn

class Mine(Base):
    def __init__(self, size):
        super().__init__(size, name="x")
        f(1, key=2)
        f(*size)
        self.other = nn.Linear(E.MEMBER)

    def late(self):
        from sglang.b import g
        return g.method()
""",
    )
    assert found == [
        ("sglang.a.f", (), None),
        ("sglang.a.Enum", (), None),
        ("sglang.a.Base", (), None),
        ("sglang.a.Base.__init__", ("name",), 2),
        ("sglang.a.Base.__init__", (), None),
        ("sglang.a.f", ("key",), 1),
        ("sglang.a.f", (), None),
        ("sglang.a.Enum.MEMBER", (), None),
        ("sglang.b.g", (), None),
        ("sglang.b.g.method", (), 0),
        ("sglang.b.g.method", (), None),
    ]


def test_installed_sglang_is_compatible():
    compat.check_version()
    symbols = server_symbols()
    assert len({symbol.path for symbol in symbols}) > 100
    compat.check_symbols(symbols)


def test_installed_sglang_has_every_symbol_of_the_programs():
    """Those that no server uses; the attention backends' modules may need a GPU's libraries."""
    files = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "attention"]
    compat.check_symbols(symbols_in(files))


def test_installed_sglang_has_every_patched_attribute():
    """Of all patches, also of those that this machine does not need."""
    compat.check_symbols([symbol for patch in patches.PATCHES for symbol in patch.symbols])


@pytest.mark.parametrize("backend", ["torch_native", "flashinfer", "triton"])
def test_installed_sglang_has_every_symbol_of(backend: str):
    """fa3's module needs a GPU's libraries: tests/gpu/test_kernels.py."""
    assert backend_symbols(backend)
    compat.check_symbols(backend_symbols(backend))


def test_every_listed_method_is_used():
    """The sources name every attribute that is reached through an object."""
    files = (*PACKAGE.rglob("*.py"), *(PACKAGE / "patches").rglob("*.py"))  # the latter is a link
    sources = "".join(path.read_text(encoding="utf-8") for path in files)
    listed = [*METHODS, *(path for methods in BACKEND_METHODS.values() for path in methods)]
    through = {
        "resolve_collector_class": "stat_loggers",
        "update_single_wrapper": "indices_updater_prefill",
        "ForwardMetadata": "forward_metadata",
        "FlashAttentionMetadata": "forward_metadata",
    }
    names = [path.rpartition(".")[2] for path in listed]
    assert [
        name
        for name in names
        if f".{through.get(name, name)}" not in sources
        and f"def {through.get(name, name)}" not in sources
    ] == []


def test_another_version_is_refused_with_found_expected_and_fix(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda _: "0.4.0")
    with pytest.raises(CompatError, match=r"found SGLang 0\.4\.0, expected .*Fix: pip install"):
        compat.check_version()


def test_a_missing_symbol_is_reported_with_its_user():
    with pytest.raises(CompatError, match=r"NoSuchThing: found nothing .* used by a\.py:1"):
        compat.check_symbols([Symbol(MISSING, "a.py:1")])


@pytest.mark.parametrize(
    ("keywords", "num_positional", "reason"),
    [
        (("num_slots",), None, "unexpected keyword argument 'num_slots'"),
        ((), 1, "missing a required argument: 'num_tokens'"),
        ((), 9, "too many positional arguments"),
    ],
)
def test_changed_parameters_are_reported(keywords, num_positional, reason: str):
    """Here the call is wrong; after a change in SGLang the signature is."""
    path = "sglang.srt.mem_cache.allocation.alloc_token_slots"
    with pytest.raises(CompatError, match=rf"found parameters \[.*num_tokens.*{reason}.*a\.py:1"):
        compat.check_symbols([Symbol(path, "a.py:1", keywords, num_positional)])


@pytest.mark.parametrize("changed", ["removed", "renamed parameter"])
def test_a_changed_sglang_is_reported_with_the_line_that_uses_it(monkeypatch, changed: str):
    from sglang.srt.mem_cache import allocation

    if changed == "removed":
        monkeypatch.delattr(allocation, "alloc_for_spec_decode")
    else:
        monkeypatch.setattr(allocation, "alloc_for_spec_decode", lambda cache: cache)
    with pytest.raises(CompatError, match=r"alloc_for_spec_decode: found .*engine/.*\.py:\d+"):
        compat.check_symbols(server_symbols())


def test_the_start_refuses_a_patch_whose_target_is_gone(monkeypatch):
    from sglang_parse.plugin import validate_server_args

    patch = replace(patches.PATCHES[0], changes={MISSING: around(lambda original: original)})
    monkeypatch.setattr(patches, "PATCHES", (patch,))
    text = f"NoSuchThing: found nothing .* used by the patch {patch.name}"
    with pytest.raises(CompatError, match=text):
        validate_server_args(None)


def test_pin_is_an_exact_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", compat.pinned_version())
