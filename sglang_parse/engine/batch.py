"""Views of SGLang's batch: a forward of some of its requests."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from sglang.srt.runtime_context import get_schedule

from sglang_parse.device import on_device
from sglang_parse.engine.sglang_types import Req, ScheduleBatch


def select_requests(
    batch: ScheduleBatch,
    indices: Sequence[int],
    seq_lens: Sequence[int],
    input_ids: Sequence[int] | torch.Tensor | None,
) -> ScheduleBatch:
    """Copies a ``ScheduleBatch`` shallowly for a forward of some of its requests.

    The caller sets slots, mode and ``spec_info``. Sampling and log probabilities are removed,
    because PARSE does both after the forward.

    Args:
        indices: [n] indices into ``batch.reqs``.
        seq_lens: [n] lengths with the new rows included.
        input_ids: the new rows' tokens, requests concatenated; a tensor is on the device; None
            if the caller sets them.
    """
    view = copy.copy(batch)
    view.reqs = [batch.reqs[i] for i in indices]
    if [*indices] != [*range(len(batch.reqs))]:
        view.req_pool_indices = batch.req_pool_indices[on_device(indices, batch.device)]
    view.seq_lens_cpu = torch.tensor(seq_lens)
    view.seq_lens = on_device(seq_lens, batch.device)
    view.seq_lens_sum = sum(seq_lens)
    view.orig_seq_lens = view.seq_lens.to(torch.int32)
    if input_ids is not None and not isinstance(input_ids, torch.Tensor):
        input_ids = on_device(input_ids, batch.device)
    view.input_ids = input_ids
    inputs = batch.multimodal_inputs
    view.multimodal_inputs = [inputs[i] for i in indices] if inputs else None
    view.return_logprob = False
    view.sampling_info = None
    return view


def max_forward_rows() -> int:
    """Maximum rows of one forward: a prefill chunk, for which SGLang reserves memory."""
    schedule = get_schedule()
    chunk = schedule.chunked_prefill_size or -1
    return chunk if chunk > 0 else schedule.max_prefill_tokens


def spans_within(sizes: Sequence[Sequence[int]], limits: Sequence[int]) -> list[slice]:
    """Splits items into consecutive spans whose sizes stay within the limits: as few as possible,
    and of equal sizes where that takes no more of them.

    Args:
        sizes: [items][kinds of size].
        limits: [kinds of size] maximum sum of a span; a larger item gets a span by itself.
    """
    spans = _spans_within(sizes, limits)
    if len(spans) < 2:
        return spans
    even_sums = [-(-sum(kind) // len(spans)) for kind in zip(*sizes, strict=True)]
    even = _spans_within(sizes, [*map(min, limits, even_sums)])
    return even if len(even) == len(spans) else spans


def _spans_within(sizes: Sequence[Sequence[int]], limits: Sequence[int]) -> list[slice]:
    starts, totals = [0], [0] * len(limits)
    for i, size in enumerate(sizes):
        totals = [*map(sum, zip(totals, size, strict=True))]
        if i > starts[-1] and any(t > limit for t, limit in zip(totals, limits, strict=True)):
            starts.append(i)
            totals = [*size]
    return [slice(*span) for span in pairwise([*starts, len(sizes)])] if sizes else []


def slots_of(pool: Any, reqs: Sequence[Req], spans: Iterable[tuple[int, int]]) -> torch.Tensor:
    """int64 [sum of lengths] KV slots of a span [start, end) of each request's row of ``pool``, a
    ``ReqToTokenPool``: one look-up, however many requests there are."""
    table, rows = pool.req_to_token, zip(reqs, spans, strict=True)
    places = [np.arange(*span) + req.kv.req_pool_idx * table.shape[1] for req, span in rows]
    return table.take(on_device(np.concatenate(places), table.device)).to(torch.int64)
