"""A GPU without numbers: where would the host wait for it, and which tensors lie on the wrong side?

PyTorch's fake tensors know shape, dtype and device. On them an operation of host and device
tensors raises, and so does every look at a device tensor's numbers. On top of that ``fake_gpu``
raises at copies that wait for what the device is at, also where they are hidden: a number that is
written to several places of a device tensor (``tensor[places] = True``) is copied to the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("cuda", 0)


class HostWaits(AssertionError):
    """A copy between host and device that returns when the device has done all before it."""


class _NoBlockingCopies(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default:
            source, to, is_blocking = args[0], result, not kwargs.get("non_blocking")
        elif func is torch.ops.aten.copy_.default:
            source, to = args[1], args[0]
            is_blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        elif func is torch.ops.aten.index_put_.default:
            source, to, is_blocking = args[2], args[0], True
        else:
            return result
        if is_blocking and source.device.type != to.device.type:
            raise HostWaits(f"{func}: {source.device} to {to.device}, {tuple(source.shape)}")
        return result


@contextmanager
def fake_gpu() -> Iterator[None]:
    """All tensors made inside are fake; those on ``GPU`` are out of the host's reach."""
    with FakeTensorMode(), _NoBlockingCopies():
        yield
