"""An MTP layer shares its target's embedding and LM head on a CPU (ledger: shared_head_cpu)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_parse.patches.base import Patch, around


def _nothing(device: Any = None) -> None:
    del device


def _share(original: Callable, self: Any) -> None:
    synchronize, torch.cuda.synchronize = torch.cuda.synchronize, _nothing
    try:
        original(self)
    finally:
        torch.cuda.synchronize = synchronize


PATCH = Patch(
    "shared_head_cpu",
    {"sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.init_lm_head": around(_share)},
    why="`set_embed_and_head` of GLM-4.5, DeepSeek and others ends with "
    "`torch.cuda.synchronize()`, which raises on a CPU.",
    how="does nothing in its place. Only on machines without an accelerator.",
    removed_when="these classes call `current_platform.synchronize`, as `MiMoMTP` does.",
)
