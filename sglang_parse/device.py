"""Copies to the device and back.

Under overlap an iteration is launched without a wait for the previous one: copies to the device go
through pinned memory, and copies to the host are waited for when they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.utils.common import async_d2h, async_h2d

Numbers = Sequence[float] | Sequence[bool]


def on_device(
    values: Numbers | Sequence[Numbers], device: Any, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Copies numbers to a tensor of one or two dimensions on ``device``, without a device sync."""
    return async_h2d(values, dtype=dtype, device=device)


class HostCopy:
    """An asynchronous copy of a device tensor to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = async_d2h(tensor)
        self._copied = torch.get_device_module(tensor.device).Event()
        self._copied.record()

    def tolist(self) -> list:
        """Waits for the copy, not for later launches, and returns the numbers."""
        self._copied.synchronize()
        return self._host.tolist()


def wait_for_device(device: Any) -> None:
    """Waits for everything launched on the current stream."""
    launched = torch.get_device_module(device).Event()
    launched.record()
    launched.synchronize()
