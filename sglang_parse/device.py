"""The ways to the device and back.

Under overlap nothing on the way to an iteration's launch may wait for the one before it: what goes
to the device goes through pinned memory, and what comes back is waited for where it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.utils.common import async_d2h, async_h2d

Numbers = Sequence[int] | Sequence[bool]


def on_device(
    values: Numbers | Sequence[Numbers], device: Any, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """``values`` as a tensor of one or two dimensions on ``device``, by one copy and without a
    wait for what runs there."""
    return async_h2d(values, dtype=dtype, device=device)


class HostCopy:
    """A device tensor on its way to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = async_d2h(tensor)
        self._copied = torch.get_device_module(tensor.device).Event()
        self._copied.record()

    def tolist(self) -> list:
        """The numbers; waits for them, not for what was launched later."""
        self._copied.synchronize()
        return self._host.tolist()


def wait_for_device(device: Any) -> None:
    """Until what has been launched on the current stream is done."""
    launched = torch.get_device_module(device).Event()
    launched.record()
    launched.synchronize()
