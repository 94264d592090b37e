"""What a patch is, and how to tell that it is in force."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType


class PatchError(RuntimeError):
    """A patch is not in force."""


def always() -> bool:
    return True


def on_cpu_only() -> bool:
    """True where PyTorch sees no accelerator at all."""
    return not torch.accelerator.is_available()


@dataclass(frozen=True, slots=True)
class Patch:
    """One runtime change.

    Attributes:
        name: file name without ``.py``; its id in the ledger.
        register: hands the change to SGLang (or makes it).
        is_applied: whether the change is in force in this process.
        is_needed: whether this machine needs it.
    """

    name: str
    register: Callable[[], None]
    is_applied: Callable[[], bool]
    is_needed: Callable[[], bool] = always


def hook_patch(
    name: str,
    hooks: dict[str, tuple[Callable, HookType]],
    is_needed: Callable[[], bool] = always,
) -> Patch:
    """A patch made of SGLang hooks: dotted target -> (hook, type)."""

    def register() -> None:
        for target, (hook, kind) in hooks.items():
            HookRegistry.register(target, hook, kind)

    def is_applied() -> bool:
        return all(is_hooked(target, hook) for target, (hook, _) in hooks.items())

    return Patch(name, register, is_applied, is_needed)


def is_hooked(target: str, hook: Callable) -> bool:
    """Whether SGLang's wrapper around ``target`` calls ``hook``."""
    function = pkgutil.resolve_name(target)
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents is hook for cell in cells):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
