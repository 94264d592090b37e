"""LoRA adapters on a CPU: plain memory where SGLang wants pinned memory (ledger: lora_cpu)."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from sglang_parse.patches.base import Patch, on_cpu_only

MODULES = ("sglang.srt.lora.layers", "sglang.srt.lora.backend.torch_backend")


class _UnpinnedTorch:
    """``torch`` for one module: the same functions, but ``pin_memory`` asks for nothing."""

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


def _unpinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _register() -> None:
    for name in MODULES:
        importlib.import_module(name).torch = _UnpinnedTorch()  # type: ignore[attr-defined]
    # The method has no module of its own; without an accelerator it can only raise.
    torch.Tensor.pin_memory = _unpinned  # type: ignore[method-assign, assignment]


def _is_applied() -> bool:
    modules = [importlib.import_module(name) for name in MODULES]
    is_replaced = all(isinstance(module.torch, _UnpinnedTorch) for module in modules)
    return is_replaced and torch.Tensor.pin_memory is _unpinned


PATCH = Patch(
    "lora_cpu",
    targets={**{f"{name}.torch": () for name in MODULES}, "torch.Tensor.pin_memory": ()},
    register=_register,
    is_applied=_is_applied,
    why="SGLang's LoRA layers and its `torch_native` LoRA backend ask for pinned memory, "
    "which PyTorch refuses without an accelerator: a CPU server with `--enable-lora` "
    "stops while it builds its first layer.",
    how="both modules see a `torch` whose `tensor` and `zeros` ignore `pin_memory`; "
    "`Tensor.pin_memory` returns the tensor itself. Only on machines without an "
    "accelerator, where the originals can only raise.",
    removed_when="SGLang asks `is_pin_memory_available` there, as its LoRA memory pool does.",
    is_needed=on_cpu_only,
)
