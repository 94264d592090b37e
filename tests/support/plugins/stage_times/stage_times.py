"""Test-only SGLang plugin: writes down what the off switch of a PARSE server is told.

``record_stage_times.py`` puts this folder on PYTHONPATH of a server and names a file in
``STAGE_TIMES``; without that variable the plugin does nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from sglang_parse.core.payoff import Timed


def register() -> None:
    path = os.environ.get("STAGE_TIMES")
    if not path:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    record = Record(Path(path))
    for method in ("saw", "saw_round"):
        HookRegistry.register(
            f"sglang_parse.core.payoff.OffSwitch.{method}", getattr(record, method), HookType.AROUND
        )


class Record:
    """One line per stage of an iteration, and one per judged draft."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def saw(self, original: Callable, switch: Any, iteration: Iterable[Timed]) -> None:
        iteration = list(iteration)
        for timed in iteration:
            self._write(timed.stage.value, timed.size, timed.amount, round(timed.ms, 3))
        original(switch, iteration)

    def saw_round(self, original: Callable, switch: Any, threshold: float, *figures: int) -> None:
        self._write("round", threshold, *figures)
        original(switch, threshold, *figures)

    def _write(self, *values: Any) -> None:
        with self.path.open("a") as lines:
            lines.write(json.dumps(values) + "\n")
