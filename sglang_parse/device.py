"""Copies to the device and back, and its clock.

Under overlap an iteration is launched without a wait for the previous one: copies to the device go
through pinned memory, and copies to the host are waited for when they are read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.utils.common import async_d2h, async_h2d

Numbers = Sequence[float] | Sequence[bool] | np.ndarray


def on_device(
    values: Numbers | Sequence[Numbers], device: Any, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Copies numbers to a tensor of one or two dimensions on ``device``, without a device sync."""
    return async_h2d(values, dtype=dtype, device=device)


class DeviceClock:
    """Times what a device does: its events on a GPU, the host's clock on a CPU.

    On a GPU the host's clock tells when it launched and waited, not what a forward took.
    """

    def __init__(self, device: Any) -> None:
        is_cpu = torch.device(device).type == "cpu"
        self._module = None if is_cpu else torch.get_device_module(device)

    def mark(self) -> Any:
        if self._module is None:
            return time.perf_counter()
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start: Any, end: Any) -> float | None:
        """Time between two marks; None until the device has passed ``end``. Never waits."""
        if self._module is None:
            return (end - start) * 1e3
        return start.elapsed_time(end) if end.query() else None


class HostCopy:
    """An asynchronous copy of a device tensor to the host.

    Attributes:
        tensor: on the device.
        made: mark of the tensor's device clock before the copy.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.made = DeviceClock(tensor.device).mark()
        self._host = async_d2h(tensor)
        self._copied = torch.get_device_module(tensor.device).Event()
        self._copied.record()

    def tolist(self) -> list:
        """Waits for the copy, not for later launches, and returns the numbers."""
        self._copied.synchronize()
        return self._host.tolist()


def joined_shape(column: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Of a column's tensors, if they were one; (0,) without any."""
    return (sum(map(len, column)), *column[0].shape[1:]) if column else (0,)


def pack(columns: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """float64 [numbers of all tensors], for one copy to the host; exact for token ids. A column's
    tensors are [n] or [n, width]."""
    return torch.cat([one.reshape(-1).double() for column in columns for one in column])


def unpack(values: Sequence[float], shapes: Sequence[Sequence[int]]) -> Iterator[list]:
    """What ``pack`` packed, a list for each column: of [n] numbers, of [n, width] n lists."""
    start = 0
    for num, *widths in shapes:
        width = widths[0] if widths else 1
        end = start + num * width
        some = values[start:end]
        yield [some[at : at + width] for at in range(0, len(some), width)] if widths else [*some]
        start = end
