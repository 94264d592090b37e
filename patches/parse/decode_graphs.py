"""What PARSE's models capture CUDA graphs of (ledger: decode_graphs)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_exec

from sglang_parse.algorithm import is_parse
from sglang_parse.core.config import ParseConfig
from sglang_parse.patches.base import Hook, hook_patch


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
        "sglang.srt.model_executor.model_runner.ModelRunner.init_cuda_graphs": Hook(
            _capture_plain_steps, HookType.AROUND, ("self",)
        ),
    },
    why="for every speculative algorithm SGLang captures the target's decode graphs as "
    "verification steps, as wide as the longest pass of all, and none for a draft model. "
    "PARSE's passes are ragged and use those of prefills; what recurs in the same shape "
    "are the draft's and the target's plain decode steps. And an EAGLE-3 head reads the "
    "target's hidden states of every forward, which SGLang's graphs keep only on servers "
    "that return them to clients: a step that asks a graph for more than was captured "
    "ends the server.",
    how="while a PARSE server's target or draft captures its graphs, its `spec_algorithm` is "
    "`NONE`; for the target beside a head, SGLang's setting for the hidden states that "
    "are kept is `full` meanwhile, as it is for its own EAGLE-3. Other servers call the "
    "original.",
    removed_when="an algorithm can say which steps are captured, and with which hidden states.",
)
