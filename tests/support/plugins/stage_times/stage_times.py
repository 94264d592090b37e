"""Test-only SGLang plugin: logs the observations of a PARSE server's controller, or gives it times.

``record_loads.py`` puts this folder on PYTHONPATH of a server and names a file in ``STAGE_TIMES``.
With ``STAGE_COSTS``, ms of a target forward, of each of its rows and of an EAGLE-3 head, separated
by spaces, the policy decides by these, whatever else the machine does: counts are those of every
run. Without a variable the plugin does nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang_parse.core.phases import DraftKey
from sglang_parse.core.round import Round
from sglang_parse.core.stage import Stage, StageTime

CONTROLLER = "sglang_parse.core.policy.controller.Controller"


def register() -> None:
    path, costs = os.environ.get("STAGE_TIMES"), os.environ.get("STAGE_COSTS")
    if not path and not costs:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if costs:
        given = Costs(*map(float, costs.split()))
        for method in ("observe", "observe_prefill"):
            HookRegistry.register(f"{CONTROLLER}.{method}", getattr(given, method), HookType.AROUND)
        return
    record = Record(Path(path))
    for method in ("observe", "observe_round"):
        HookRegistry.register(f"{CONTROLLER}.{method}", getattr(record, method), HookType.AROUND)


class Costs:
    """Times by rows, in ms."""

    def __init__(self, forward: float, row: float, head: float) -> None:
        self.forward, self.row, self.head = forward, row, head

    def observe(
        self, original: Callable, controller: Any, stages: Iterable[StageTime], outputs: Any
    ) -> None:
        original(controller, [*map(self._of, stages)], outputs)

    def observe_prefill(
        self, original: Callable, controller: Any, ms: float, num_tokens: int = 0, *_: float
    ) -> None:
        original(controller, ms, num_tokens, self.row * num_tokens)

    def _of(self, timed: StageTime) -> StageTime:
        if timed.stage not in (Stage.VERIFY, Stage.DECODE):
            return replace(timed, ms=0.0)
        head_ms = self.head if timed.head_ms else 0.0
        ms = self.forward + self.row * timed.num_rows + head_ms
        return replace(timed, ms=ms, head_ms=head_ms)


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
