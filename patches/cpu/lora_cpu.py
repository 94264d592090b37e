"""LoRA adapters without pinned memory on a CPU (ledger: lora_cpu)."""

from __future__ import annotations

from typing import Any

import torch

from sglang_parse.patches.base import Patch, Value


class _UnpinnedTorch:
    """``torch`` with ``pin_memory`` ignored, for one module."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        del pin_memory
        return torch.tensor(*args, **kwargs)

    @staticmethod
    def zeros(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        del pin_memory
        return torch.zeros(*args, **kwargs)


_UNPINNED = Value(_UnpinnedTorch())


def _unpinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


PATCH = Patch(
    "lora_cpu",
    {
        "sglang.srt.lora.layers.torch": _UNPINNED,
        "sglang.srt.lora.backend.torch_backend.torch": _UNPINNED,
        # The method has no module of its own; without an accelerator it can only raise.
        "torch.Tensor.pin_memory": Value(_unpinned),
    },
    why="SGLang's LoRA layers and its `torch_native` LoRA backend request pinned memory, which "
    "PyTorch refuses without an accelerator: a CPU server with `--enable-lora` stops while it "
    "builds its first layer.",
    how="in both modules, `tensor` and `zeros` of `torch` ignore `pin_memory`; "
    "`Tensor.pin_memory` returns the tensor itself. Only on machines without an accelerator, "
    "where the originals can only raise.",
    removed_when="SGLang asks `is_pin_memory_available` there, as its LoRA memory pool does.",
)
