"""Timers for the programs that print costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.benchmark import Timer


def milliseconds(work: Callable[[], Any]) -> float:
    """Median; waits for the device, where there is one."""
    return Timer("work()", globals={"work": work}).blocked_autorange(min_run_time=0.3).median * 1e3
