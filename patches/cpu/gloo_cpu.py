"""Process groups without NCCL on a CPU: tensor parallelism over gloo (ledger: gloo_cpu)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_parse.patches.base import Hook, hook_patch, on_cpu_only


def _without_pynccl(original: Callable, *args: Any, **kwargs: Any) -> Any:
    # SGLang passes the hint by keyword everywhere.
    return original(*args, **{**kwargs, "use_pynccl": False})


PATCH = hook_patch(
    "gloo_cpu",
    {
        "sglang.srt.distributed.parallel_state.init_model_parallel_group": Hook(
            _without_pynccl, HookType.AROUND, ("use_pynccl",)
        ),
    },
    why="with `--tp-size 2` on a CPU the tensor-parallel group makes an NCCL communicator "
    'whenever the NCCL library can be loaded, which ends in "Expected a cuda device, but '
    'got: cpu": stock SGLang stops there before it loads a model.',
    how="passes `use_pynccl=False`; collectives then use the group's gloo backend. Only on "
    "machines without an accelerator.",
    removed_when="SGLang asks for NCCL only on devices that have it.",
    is_needed=on_cpu_only,
)
