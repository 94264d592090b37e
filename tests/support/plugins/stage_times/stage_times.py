"""Test-only SGLang plugin: logs the observations of a PARSE server's controller.

``record_loads.py`` puts this folder on PYTHONPATH of a server and names a file in
``STAGE_TIMES``; without that variable the plugin does nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from sglang_parse.core.phases import DraftKey
from sglang_parse.core.round import Round
from sglang_parse.core.stage import StageTime


def register() -> None:
    path = os.environ.get("STAGE_TIMES")
    if not path:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    record = Record(Path(path))
    controller = "sglang_parse.core.policy.controller.Controller"
    for method in ("observe", "observe_round"):
        HookRegistry.register(f"{controller}.{method}", getattr(record, method), HookType.AROUND)


class Record:
    """Writes one line per stage of an iteration and one per verified draft."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def observe(
        self, original: Callable, controller: Any, stages: Iterable[StageTime], outputs: Any
    ) -> None:
        stages = list(stages)
        for timed in stages:
            self._write(timed.stage.value, timed.size, timed.num_tokens, round(timed.ms, 3))
        original(controller, stages, outputs)

    def observe_round(
        self,
        original: Callable,
        controller: Any,
        key: DraftKey,
        one: Round,
        num_failed: int = 0,
    ) -> None:
        counts = one.num_drafted, one.num_verified, one.accepted_len, one.reject_end
        self._write("round", key[0], *counts, one.is_finished, one.num_matched)
        original(controller, key, one, num_failed)

    def _write(self, *values: Any) -> None:
        with self.path.open("a") as lines:
            lines.write(json.dumps(values) + "\n")
