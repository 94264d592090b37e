"""What a patch is, what the ledger says of it, and how to tell that it is in force."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_parse.startup.seams import Seam


class PatchError(RuntimeError):
    """A patch is not in force."""


def always() -> bool:
    return True


def on_cpu_only() -> bool:
    """True where PyTorch sees no accelerator at all."""
    return not torch.accelerator.is_available()


@dataclass(frozen=True, slots=True)
class Patch:
    """One runtime change, with its entry in the ledger (``patches.ledger`` prints it).

    Attributes:
        name: file name without ``.py``; its id in the ledger.
        targets: dotted paths of the attributes it changes, each with the parameters it relies on.
        register: hands the change to SGLang (or makes it).
        is_applied: whether the change is in force in this process.
        why: what SGLang does that PARSE, or a CPU, cannot live with.
        how: what the change does instead.
        removed_when: what SGLang would need, so that the patch can go.
        upstream: where SGLang's own project knows of it.
        is_needed: whether this machine needs it.
    """

    name: str
    _: KW_ONLY
    targets: Mapping[str, tuple[str, ...]]
    register: Callable[[], None]
    is_applied: Callable[[], bool]
    why: str
    how: str
    removed_when: str
    upstream: str = "none"
    is_needed: Callable[[], bool] = always

    @property
    def seams(self) -> list[Seam]:
        """Its targets, for the check at start."""
        why = f"is changed by the patch {self.name}"
        return [Seam(path, parameters, why) for path, parameters in self.targets.items()]


@dataclass(frozen=True, slots=True)
class Hook:
    """One of SGLang's hooks.

    Attributes:
        function: what SGLang calls; with ``HookType.REPLACE``, in the target's place.
        kind: when it is called.
        relies_on: parameters the target must have; where it is replaced, the function's own.
    """

    function: Callable
    kind: HookType
    relies_on: tuple[str, ...] = ()

    @property
    def parameters(self) -> tuple[str, ...]:
        if self.kind is HookType.REPLACE:
            return tuple(inspect.signature(self.function).parameters)
        return self.relies_on


class Hooks:
    """SGLang hooks that belong together: dotted target -> hook."""

    def __init__(self, hooks: Mapping[str, Hook]) -> None:
        self._hooks = hooks
        self.targets = {target: hook.parameters for target, hook in hooks.items()}

    def register(self) -> None:
        for target, hook in self._hooks.items():
            HookRegistry.register(target, hook.function, hook.kind)

    def is_applied(self) -> bool:
        return all(is_hooked(target, hook.function) for target, hook in self._hooks.items())


def hook_patch(
    name: str,
    hooks: Mapping[str, Hook],
    *,
    why: str,
    how: str,
    removed_when: str,
    upstream: str = "none",
    is_needed: Callable[[], bool] = always,
) -> Patch:
    """A patch made of SGLang hooks only; see ``Patch``."""
    made = Hooks(hooks)
    return Patch(
        name,
        targets=made.targets,
        register=made.register,
        is_applied=made.is_applied,
        why=why,
        how=how,
        removed_when=removed_when,
        upstream=upstream,
        is_needed=is_needed,
    )


def is_hooked(target: str, hook: Callable) -> bool:
    """Whether SGLang's wrapper around ``target`` calls ``hook``."""
    function = pkgutil.resolve_name(target)
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents is hook for cell in cells):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
