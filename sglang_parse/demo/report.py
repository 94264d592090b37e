"""The figures as ``build/demo.json``."""

from __future__ import annotations

import os
import platform
from typing import Any

from sglang_parse.client.conditions import versions
from sglang_parse.demo.figures import DemoFigures
from sglang_parse.demo.settings import DemoSettings

KEYS = {
    **dict.fromkeys(
        (f"settings.{name}" for name in ("problems", "accuracy_problems", "runs", "concurrency")),
        "what the command line asked for",
    ),
    **dict.fromkeys(
        (f"machine.{name}" for name in ("cpus", "architecture", "python", "sglang", "torch")),
        "where and with what",
    ),
    "seconds": "the whole demo, server starts included",
}
"""Keys of ``report`` that are no field of its figures -> meaning."""


def report(settings: DemoSettings, figures: DemoFigures, seconds: float) -> dict[str, Any]:
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
            **{name: versions()[name] for name in ("python", "sglang", "torch")},
        },
        "seconds": round(seconds, 1),
        **figures.as_json(),
    }
