"""What PARSE's models capture CUDA graphs of (ledger: decode_graphs)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_exec

from sglang_parse.algorithm import is_parse
from sglang_parse.core.config import ParseConfig
from sglang_parse.patches.base import hook_patch


def _capture_plain_steps(original: Callable, runner: Any, *args: Any, **kwargs: Any) -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    algorithm = runner.spec_algorithm
    if not is_parse(algorithm):
        original(runner, *args, **kwargs)
        return
    runner.spec_algorithm = SpeculativeAlgorithm.NONE
    try:
        with _states_for_a_head(runner):
            original(runner, *args, **kwargs)
    finally:
        runner.spec_algorithm = algorithm


@contextmanager
def _states_for_a_head(runner: Any) -> Iterator[None]:
    """A step that asks a graph for more hidden states than it was captured with ends the server."""
    if runner.is_draft_worker or not ParseConfig.from_env().uses_eagle3:
        yield
        return
    with get_exec().features.override(return_hidden_states_mode="full"):
        yield


PATCH = hook_patch(
    "decode_graphs",
    {
        "sglang.srt.model_executor.model_runner.ModelRunner.init_cuda_graphs": (
            _capture_plain_steps,
            HookType.AROUND,
        )
    },
)
