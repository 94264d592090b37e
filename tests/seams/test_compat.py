"""The version pin and the table of upstream seams, against the installed SGLang."""

import re
from importlib import metadata

import pytest

from sglang_parse.startup import compat
from sglang_parse.startup.compat import CompatError
from sglang_parse.startup.seams import Seam

pytestmark = pytest.mark.seams


def test_installed_sglang_has_every_seam():
    compat.check()


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


def test_pin_is_an_exact_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", compat.pinned_version())
