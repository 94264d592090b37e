"""Examples in docstrings of the method say what it does."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = ("layout", "phases", "selection", "text_match")


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str):
    found = doctest.testmod(importlib.import_module(f"sglang_parse.core.{name}"))
    assert found.attempted
    assert not found.failed
