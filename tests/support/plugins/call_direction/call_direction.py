"""Test-only SGLang plugin: which of PARSE's functions call which, while a server decodes.

The test puts this folder on PYTHONPATH of a server and names a file in ``CALLS_FILE``; without that
variable the plugin does nothing. While a file ``<CALLS_FILE>.on`` is there, every turn of the
scheduler's loop is profiled, and each new call from one of PARSE's modules into another is a line
of the file: caller and callee as [module, function].

A call whose nearest caller outside the standard library is SGLang's or PyTorch's is theirs, not
PARSE's: it is left out.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

OURS, THEIRS = "sglang_parse.", ("sglang.", "torch.")


def register() -> None:
    path = os.environ.get("CALLS_FILE")
    if not path:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    calls = Calls(Path(path))
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    for method in ("get_next_batch_to_run", "run_batch", "process_batch_result"):
        HookRegistry.register(f"{scheduler}.{method}", calls.profiled, HookType.AROUND)


class Calls:
    """The calls seen in one scheduler process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen: set[tuple[str, ...]] = set()

    def profiled(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        if not self.path.with_suffix(".on").exists():
            return original(*args, **kwargs)
        sys.setprofile(self.look)
        try:
            return original(*args, **kwargs)
        finally:
            sys.setprofile(None)

    def look(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not module_of(frame).startswith(OURS):
            return
        caller = frame.f_back
        while caller is not None and not module_of(caller).startswith((OURS, *THEIRS)):
            caller = caller.f_back
        if caller is None or not module_of(caller).startswith(OURS):
            return
        call = (*place(caller), *place(frame))
        if call not in self.seen:
            self.seen.add(call)
            with self.path.open("a") as lines:
                lines.write(json.dumps([call[:2], call[2:]]) + "\n")


def module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def place(frame: FrameType) -> tuple[str, str]:
    return module_of(frame), frame.f_code.co_qualname
