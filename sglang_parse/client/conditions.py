"""Conditions of a measurement: date, machine, versions."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("sglang-parse", "sglang", "torch", "transformers")


def of_now(packages: Sequence[str] = ()) -> dict[str, Any]:
    """All of them; the versions of ``packages``, too."""
    return {"date": date(), "machine": machine(), "versions": versions(packages)}


def date() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def versions(more: Sequence[str] = ()) -> dict[str, str]:
    """Versions of Python, of the packages that figures depend on, and of ``more``."""
    return {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in (*PACKAGES, *more)},
    }


def machine() -> dict[str, Any]:
    """Processor, memory and accelerators of this machine."""
    import torch

    return {
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "accelerators": [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())],
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or "unknown"
