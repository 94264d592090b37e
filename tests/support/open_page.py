"""A page in a real browser (``browser.py``), for tests."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

BROWSER = Path(__file__).resolve().with_name("browser.py")


def look_at(
    page: Path, width: int, steps: Sequence[dict[str, str]] = (), *, dark: bool = False
) -> dict[str, Any]:
    """``browser.py``'s report; a screenshot is beside the page.

    Skips where the engine's system libraries (libnss3, libEGL, ...) are missing.
    """
    try:
        from PySide6 import QtWebEngineWidgets  # noqa: F401
    except ImportError as error:
        pytest.skip(f"no browser: {error}; fix: install the library it names")
    picture = page.with_name(f"{page.stem}-{width}{'-dark' if dark else ''}.png")
    command = [sys.executable, str(BROWSER), str(page), str(width), str(picture)]
    command += ["--steps", json.dumps(list(steps)), *(["--dark"] if dark else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_fits(found: dict[str, Any], page: Path, width: int) -> None:
    """Nothing is clipped or outside, nothing failed, and only the page itself was requested."""
    assert found["loaded"]
    assert found["console"] == []
    assert found["page_width"] <= found["inner_width"] == width
    assert (found["outside"], found["cut"]) == ([], [])
    urls = [url for url in found["requests"] if not url.startswith("data:")]
    assert urls == [page.resolve().as_uri()]
