"""Views of the scheduler's batch: some of its requests, ready for a forward of our own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch


def select_requests(
    batch: Any, rows: Sequence[int], seq_lens: Sequence[int], input_ids: Sequence[int]
) -> Any:
    """A shallow copy of a ``ScheduleBatch`` for a forward of some requests; the original stays.

    Slots, mode and ``spec_info`` are the caller's to set. Sampling and log probabilities are
    taken out: they happen outside the forward.

    Args:
        batch: the scheduler's batch.
        rows: [n] indices into ``batch.reqs``.
        seq_lens: [n] lengths with the new rows included.
        input_ids: the new rows' tokens, requests concatenated.
    """
    view = copy.copy(batch)
    index = torch.tensor(rows)
    view.reqs = [batch.reqs[row] for row in rows]
    view.req_pool_indices = batch.req_pool_indices[index.to(batch.device)]
    view.seq_lens_cpu = torch.tensor(seq_lens)
    view.seq_lens = view.seq_lens_cpu.to(batch.device)
    view.seq_lens_sum = None
    view.orig_seq_lens = view.seq_lens.to(torch.int32)
    view.input_ids = torch.tensor(input_ids, device=batch.device)
    view.multimodal_inputs = None
    view.return_logprob = False
    view.sampling_info = None
    return view
