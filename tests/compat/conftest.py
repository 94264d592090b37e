"""Fixtures of the compatibility tests."""

import sys
from collections.abc import Iterator

import pytest

from support.servers import PLUGINS

sys.path.insert(0, str(PLUGINS / "cpu_families"))  # SGLang finds the plugin there


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags are published to the environment: keep that inside each test."""
    from sglang_parse.core.config import ENV_VAR

    monkeypatch.setenv(ENV_VAR, "")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU without numbers."""
    from support.fake_engine import engine_on_a_fake_gpu

    with engine_on_a_fake_gpu(monkeypatch):
        yield
