"""What the tests of several seams need."""

import pytest


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags are published to the environment: keep that inside each test."""
    from sglang_parse.core.config import ENV_VAR

    monkeypatch.setenv(ENV_VAR, "")
