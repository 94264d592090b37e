"""Patches: runtime changes to stock SGLang, and the checks that they are in force."""

from __future__ import annotations

import inspect
import logging
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from importlib import import_module

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_parse.startup.compat import Symbol


class PatchError(RuntimeError):
    """A patch is not in force."""


@dataclass(frozen=True, slots=True)
class Hook:
    """One of SGLang's hooks.

    Attributes:
        function: what SGLang calls. It names the target's parameters that it uses as SGLang does;
            names with a leading underscore are not used.
        kind: when SGLang calls it.
    """

    function: Callable
    kind: HookType

    @property
    def parameters(self) -> tuple[str, ...]:
        parameters = [*inspect.signature(self.function).parameters.values()]
        if self.kind in (HookType.AROUND, HookType.AFTER):
            del parameters[0]  # the original, or its result
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        names = (p.name for p in parameters if p.kind in named)
        return tuple(name for name in names if name != "cls" and not name.startswith("_"))

    def register(self, target: str) -> None:
        HookRegistry.register(target, self.function, self.kind)

    def is_applied(self, target: str) -> bool:
        """Whether SGLang's wrapper around ``target`` calls the function."""
        wrapper = pkgutil.resolve_name(target)
        while wrapper is not None:
            cells = getattr(wrapper, "__closure__", None) or ()
            if any(cell.cell_contents is self.function for cell in cells):
                return True
            wrapper = getattr(wrapper, "__wrapped__", None)
        return False


before = partial(Hook, kind=HookType.BEFORE)
after = partial(Hook, kind=HookType.AFTER)
around = partial(Hook, kind=HookType.AROUND)
replace = partial(Hook, kind=HookType.REPLACE)


@dataclass(frozen=True, slots=True)
class Value:
    """A value to set, where SGLang's hooks would not do.

    They replace by identity: of a None or a bool they would rewrite every module attribute that
    is the same object.
    """

    value: object
    parameters: tuple[str, ...] = ()

    def register(self, target: str) -> None:
        owner, _, name = target.rpartition(".")
        setattr(pkgutil.resolve_name(owner), name, self.value)

    def is_applied(self, target: str) -> bool:
        return pkgutil.resolve_name(target) is self.value


@dataclass(frozen=True, slots=True)
class Registration:
    """A call that puts something of PARSE's into an SGLang object."""

    put: Callable[[], None]
    is_put: Callable[[], bool]
    parameters: tuple[str, ...] = ()

    def register(self, target: str) -> None:  # noqa: ARG002 - ``put`` knows it
        self.put()

    def is_applied(self, target: str) -> bool:  # noqa: ARG002
        return self.is_put()


def log_filter(logger: str, added: logging.Filter) -> Registration:
    """A filter of one of SGLang's loggers."""
    return Registration(
        put=lambda: logging.getLogger(logger).addFilter(added),
        is_put=lambda: added in logging.getLogger(logger).filters,
    )


Change = Hook | Value | Registration
"""A change to one attribute of SGLang. ``register`` applies it, or hands it to SGLang; both methods
take the attribute's dotted path. ``parameters`` are those that it must have."""


def on_cpu_only() -> bool:
    """Whether PyTorch finds no accelerator at all."""
    return not torch.accelerator.is_available()


@dataclass(frozen=True, slots=True)
class Patch:
    """Changes that belong together, with their entry in the ledger (``patches/README.md``).

    Attributes:
        name: file name without ``.py``; its id in the ledger.
        changes: dotted path of the changed attribute -> change.
        why: the behaviour of SGLang that PARSE, or a CPU, cannot work with.
        how: the behaviour instead.
        removed_when: the change in SGLang that makes the patch unnecessary.
        upstream: issues or pull requests of SGLang about it.
        launcher_only: whether no other process needs it.
    """

    name: str
    changes: Mapping[str, Change]
    _: KW_ONLY
    why: str
    how: str
    removed_when: str
    upstream: str = "none"
    launcher_only: bool = False

    def register(self) -> None:
        for target, change in self.changes.items():
            change.register(target)

    def is_applied(self) -> bool:
        return all(change.is_applied(target) for target, change in self.changes.items())

    @property
    def symbols(self) -> list[Symbol]:
        """The changed attributes, for the check at start."""
        user = f"the patch {self.name}"
        return [Symbol(path, user, change.parameters) for path, change in self.changes.items()]


def patches_in(package: str, path: Iterable[str]) -> tuple[Patch, ...]:
    """Returns the ``PATCH`` of every module of a package, in the order of their names."""
    names = sorted(module.name for module in pkgutil.iter_modules(path))
    return tuple(import_module(f"{package}.{name}").PATCH for name in names)
