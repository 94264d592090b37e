"""Under which conditions the figures came about: machine, versions, commands, settings."""

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

from sglang_parse.bench.compare.lineup import NOTES, TITLES, command_of
from sglang_parse.bench.compare.settings import OWN_THRESHOLD, Settings
from sglang_parse.bench.demo.servers import DEFAULTS, ENVIRONMENT, ServerSpec

PACKAGES = ("sglang-parse", "sglang", "torch", "transformers")


def conditions(
    settings: Settings, specs: Sequence[ServerSpec], task: str, bench_command: str, seconds: float
) -> dict[str, Any]:
    """What results.json holds under ``conditions`` and the page shows."""
    environment = {**DEFAULTS, **{key: os.environ[key] for key in DEFAULTS if key in os.environ}}
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "minutes": round(seconds / 60, 1),
        "machine": machine(),
        "versions": versions(),
        "servers": {TITLES[spec.name]: command_of(spec) for spec in specs}
        | {TITLES[name]: remote.url for name, remote in settings.remotes.items()},
        "environment": environment | ENVIRONMENT if specs else {},
        "bench_serving": bench_command,
        "task": task,
        "sampling": "greedy (temperature 0)",
        "runs": settings.runs,
        "concurrencies": list(settings.concurrencies),
        "requests_per_run": {str(c): settings.num_requests(c) for c in settings.concurrencies},
        "problems": settings.problems,
        "sweep_problems": settings.sweep_problems,
        "own_threshold": OWN_THRESHOLD,
        "thresholds": list(settings.thresholds),
        "seed": settings.seed,
        "notes": [NOTES[name] for name in settings.servers if name in NOTES],
        "order": "the servers take turns in every run, in reverse order in every second run; "
        "those not in use are suspended or ended",
    }


def versions() -> dict[str, str]:
    """Of Python and of the packages the figures depend on."""
    return {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in PACKAGES},
    }


def machine() -> dict[str, Any]:
    """Processor, memory and accelerators of this machine."""
    return {
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "accelerators": _accelerators(),
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or "unknown"


def _accelerators() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
