"""Tensor parallelism over gloo on a CPU (ledger: gloo_cpu)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_parse.patches.base import Patch, around


def _without_pynccl(
    original: Callable, *args: Any, use_pynccl: bool | None = None, **kwargs: Any
) -> Any:
    del use_pynccl  # SGLang always passes it by keyword
    return original(*args, use_pynccl=False, **kwargs)


PATCH = Patch(
    "gloo_cpu",
    {"sglang.srt.distributed.parallel_state.init_model_parallel_group": around(_without_pynccl)},
    why="with `--tp-size 2` on a CPU the tensor-parallel group creates an NCCL communicator "
    'whenever the NCCL library can be loaded, which fails with "Expected a cuda device, but '
    'got: cpu": stock SGLang stops before it loads a model.',
    how="passes `use_pynccl=False`; collectives then use the group's gloo backend. Only on "
    "machines without an accelerator.",
    removed_when="SGLang uses NCCL only on devices that have it.",
)
