"""Memory a server takes: of a GPU, or the resident sets of its processes.

On a GPU it is what the devices have given away since before the server started: SGLang's allocator
keeps what it once took, so the end shows the peak. On a CPU it is the sum of the processes' largest
resident sets, which counts shared pages more than once.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from sglang_parse.client.servers import Server


def total_bytes(device: str) -> int:
    """Of all devices of that kind."""
    if device == "cpu":
        return psutil.virtual_memory().total
    return sum(total for _, total in _devices())


def used_bytes(device: str) -> int:
    """Given away by the devices; 0 for a CPU."""
    return 0 if device == "cpu" else sum(total - free for free, total in _devices())


def peak_bytes(device: str, server: Server, used_before: int) -> int:
    """See the module's text; while the server is alive."""
    if device != "cpu":
        return used_bytes(device) - used_before
    first = psutil.Process(server.pid)
    return sum(_largest_resident(p.pid) for p in (first, *first.children(recursive=True)))


def _devices() -> list[tuple[int, int]]:
    return [torch.cuda.mem_get_info(index) for index in range(torch.cuda.device_count())]


def _largest_resident(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
