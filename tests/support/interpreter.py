"""A test file again, with Triton's interpreter for the kernels of a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def assert_passes_in_interpreter(file: Path) -> None:
    """All of its tests, without the one that calls this, which must be skipped there."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(file), "-q", "-p", "no:cacheprovider"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "1 skipped" in done.stdout
