"""Decode graphs that keep what an EAGLE-3 head reads (ledger: head_states)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_exec, get_spec

from sglang_parse.algorithm import NAME
from sglang_parse.config import ParseConfig
from sglang_parse.patches.base import hook_patch


def _capture_with_states(original: Callable, *args: Any, model_runner: Any, **kwargs: Any) -> Any:
    # While graphs are captured the runner's own algorithm is none (decode_graphs).
    is_parse = get_spec().speculative_algorithm == NAME
    if not is_parse or model_runner.is_draft_worker or not ParseConfig.from_env().uses_eagle3:
        return original(*args, model_runner=model_runner, **kwargs)
    with get_exec().features.override(return_hidden_states_mode="full"):
        return original(*args, model_runner=model_runner, **kwargs)


PATCH = hook_patch(
    "head_states",
    {
        "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_decode_graph": (
            _capture_with_states,
            HookType.AROUND,
        )
    },
)
