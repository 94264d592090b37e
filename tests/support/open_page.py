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
