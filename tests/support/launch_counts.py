"""What a host sends to the device around its graphs, counted on fake tensors: not times.

Operators of PyTorch stand for launches: each writes to the device by a kernel or a copy of its
own. Those that only look at a tensor another way, or take memory, launch nothing.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FREE = frozenset(("empty", "empty_like", "new_empty", "empty_strided", "detach", "_unsafe_view"))
"""Operators without a kernel, beside those whose result is a view and what is no operator."""


@dataclass
class Launches:
    """What was counted.

    Attributes:
        copies_in: copies from host to device.
        copies_out: copies from device to host.
        kernels: other operators on the device, outside graphs.
        waits: how often the host waited for what it reads.
        drains: how often the device had no forward left to do then.
        forwards: by their mode.
        operators: ``kernels`` by name.
    """

    copies_in: int = 0
    copies_out: int = 0
    kernels: int = 0
    waits: int = 0
    drains: int = 0
    forwards: Counter[str] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)
    is_counting: bool = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is SGLang's own, or in a graph."""
        before, self.is_counting = self.is_counting, False
        try:
            yield
        finally:
            self.is_counting = before

    def during(self, call: Callable[[], Any]) -> Launches:
        """What ``call`` adds."""
        before = copy.deepcopy(self)
        call()
        names = ("copies_in", "copies_out", "kernels", "waits", "drains")
        grown = {name: getattr(self, name) - getattr(before, name) for name in names}
        forwards = self.forwards - before.forwards
        return Launches(**grown, forwards=forwards, operators=self.operators - before.operators)

    @property
    def num_forwards(self) -> int:
        return self.forwards.total()

    def wait(self, num_forwards: int) -> None:
        """The host waits for what was copied behind so many forwards."""
        self.waits += 1
        self.drains += num_forwards == self.num_forwards


class _Counting(TorchDispatchMode):
    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self.launches = launches

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.launches.is_counting:
            self._count(func, args, result)
        return result

    def _count(self, func: Any, args: tuple, result: Any) -> None:
        launches, name = self.launches, func._schema.name.removeprefix("aten::")
        if "::" in name:  # such as prim::device
            return
        sides = [value.device.type for value in tree_leaves((args, result)) if _is_tensor(value)]
        if "cuda" not in sides or func.is_view or name in FREE:
            return
        if name in ("_to_copy", "copy_"):
            source, to = (args[0], result) if name == "_to_copy" else (args[1], args[0])
            if source.device.type != to.device.type:
                launches.copies_in += to.device.type == "cuda"
                launches.copies_out += to.device.type == "cpu"
                return
        launches.kernels += 1
        launches.operators[name] += 1


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


@contextmanager
def counted() -> Iterator[Launches]:
    """Counts what is launched inside; inside ``fake_gpu``."""
    launches = Launches()
    with _Counting(launches):
        yield launches
