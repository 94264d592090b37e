"""The transfers of an iteration's launch, in both directions, do not wait for the device."""

from typing import Any

import torch


def transfer() -> Any:
    """Numbers to a busy device and back; returns once they are on their way."""
    from sglang_parse.device import HostCopy, on_device

    values = on_device([3, 1, 2], "cuda")
    flags = on_device([True, False, True], "cuda", torch.bool)
    return HostCopy(values.masked_fill(flags, 7))


def test_no_transfer_waits_before_its_result_is_used():
    transfer()  # pinned memory is taken from the system once
    busy = torch.ones(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(50):
            busy = busy @ busy * 1e-4
        host_copy = transfer()
        is_idle = torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not is_idle, "the device was idle: nothing was shown"
    assert host_copy.tolist() == [7, 1, 7]
