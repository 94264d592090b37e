"""Views of the scheduler's batch, ready for a forward of our own, and the ways to the device.

Under overlap nothing on the way to an iteration's launch may wait for the one before it: what goes
to the device goes through pinned memory, and what comes back is waited for where it is read.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.utils.common import async_d2h, async_h2d


def on_device(
    values: Sequence[int] | Sequence[bool], device: Any, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """``values`` as a tensor [len(values)] on ``device``, without a wait for what runs there."""
    return async_h2d(values, dtype=dtype, device=device)


class Readback:
    """A device tensor on its way to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = async_d2h(tensor)
        self._copied = torch.get_device_module(tensor.device).Event()
        self._copied.record()

    def tolist(self) -> list:
        """The numbers; waits for them, not for what was launched later."""
        self._copied.synchronize()
        return self._host.tolist()


def select_requests(
    batch: Any,
    rows: Sequence[int],
    seq_lens: Sequence[int],
    input_ids: Sequence[int] | torch.Tensor,
) -> Any:
    """A shallow copy of a ``ScheduleBatch`` for a forward of some requests; the original stays.

    Slots, mode and ``spec_info`` are the caller's to set. Sampling and log probabilities are
    taken out: they happen outside the forward.

    Args:
        batch: the scheduler's batch.
        rows: [n] indices into ``batch.reqs``.
        seq_lens: [n] lengths with the new rows included.
        input_ids: the new rows' tokens, requests concatenated; if a tensor, on the device.
    """
    view = copy.copy(batch)
    view.reqs = [batch.reqs[row] for row in rows]
    view.req_pool_indices = batch.req_pool_indices[on_device(rows, batch.device)]
    view.seq_lens_cpu = torch.tensor(seq_lens)
    view.seq_lens = on_device(seq_lens, batch.device)
    view.seq_lens_sum = sum(seq_lens)
    view.orig_seq_lens = view.seq_lens.to(torch.int32)
    if not isinstance(input_ids, torch.Tensor):
        input_ids = on_device(input_ids, batch.device)
    view.input_ids = input_ids
    view.multimodal_inputs = None
    view.return_logprob = False
    view.sampling_info = None
    return view
