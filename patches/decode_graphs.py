"""PARSE's models capture graphs of plain decode steps (ledger: decode_graphs)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_parse.algorithm import is_parse
from sglang_parse.patches.base import hook_patch


def _capture_plain_steps(original: Callable, runner: Any, *args: Any, **kwargs: Any) -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    algorithm = runner.spec_algorithm
    if not is_parse(algorithm):
        original(runner, *args, **kwargs)
        return
    runner.spec_algorithm = SpeculativeAlgorithm.NONE
    try:
        original(runner, *args, **kwargs)
    finally:
        runner.spec_algorithm = algorithm


PATCH = hook_patch(
    "decode_graphs",
    {
        "sglang.srt.model_executor.model_runner.ModelRunner.init_cuda_graphs": (
            _capture_plain_steps,
            HookType.AROUND,
        )
    },
)
