"""The figures as ``build/demo.json``."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from typing import Any

from sglang_parse.bench.demo.figures import Figures
from sglang_parse.bench.demo.settings import Settings


def report(settings: Settings, figures: Figures, seconds: float) -> dict[str, Any]:
    """What ``build/demo.json`` holds; its keys are documented in docs/benchmark-keys.md."""
    return {
        "settings": {
            "problems": settings.problems,
            "accuracy_problems": settings.accuracy_problems,
            "runs": settings.runs,
            "concurrency": settings.concurrency,
        },
        "machine": {
            "cpus": os.cpu_count(),
            "architecture": platform.machine(),
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("sglang", "torch")},
        },
        "seconds": round(seconds, 1),
        **figures.as_json(),
    }


def write_report(settings: Settings, figures: Figures, seconds: float) -> None:
    """Write ``settings.output``; its folder is made."""
    text = json.dumps(report(settings, figures, seconds), indent=2) + "\n"
    settings.output.parent.mkdir(parents=True, exist_ok=True)
    settings.output.write_text(text, encoding="utf-8")
