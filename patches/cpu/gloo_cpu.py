"""Process groups without NCCL on a CPU: tensor parallelism over gloo (ledger: gloo_cpu)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_parse.patches.base import hook_patch, on_cpu_only


def _without_pynccl(original: Callable, *args: Any, **kwargs: Any) -> Any:
    # SGLang passes the hint by keyword everywhere.
    return original(*args, **{**kwargs, "use_pynccl": False})


PATCH = hook_patch(
    "gloo_cpu",
    {
        "sglang.srt.distributed.parallel_state.init_model_parallel_group": (
            _without_pynccl,
            HookType.AROUND,
        )
    },
    on_cpu_only,
)
