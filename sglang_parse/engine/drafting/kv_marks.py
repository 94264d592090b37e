"""Marks of the KV slots that hold the draft model's KV.

The draft model prefills a sequence when it is about to draft for it, so requests that never draft
cost it nothing. The radix cache, however, hands out slots without knowing whose KV they hold.
Hence one mark per slot; a request's drafts begin with a look at how far its prompt is marked, and
``draft_prefill`` computes the rest.

Marks are looked up only for slots that a sequence owns. They must be right for all slots that the
radix cache may take: those of a prompt when the draft model has computed them, those of an answer
when it ends. A slot that SGLang allocates loses its mark, whatever for: the KV of a prefix may also
come from the host (hierarchical cache) or from another server (disaggregation).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_parse.core.request import RequestState
from sglang_parse.device import HostCopy, on_device
from sglang_parse.engine.sglang_types import Req


class DraftKvMarks:
    """Marks of one server's KV slots.

    Args:
        table: SGLang's ``req_to_token``, on the device.
        num_slots: exclusive upper bound of slot numbers.

    Attributes:
        allocator: SGLang's allocator of the slots.
    """

    allocator: Any = None

    def __init__(self, table: torch.Tensor, num_slots: int) -> None:
        self._table = table
        self._marked = torch.zeros(num_slots, dtype=torch.bool, device=table.device)
        self._allocated: list[torch.Tensor] = []

    def note_allocated(self, slots: torch.Tensor) -> None:
        """Slots, int [n] on the device, get other tokens from the next launch on."""
        self._allocated.append(slots)

    def unmark_allocated(self) -> None:
        """Called before a launch, on its stream: behind the forwards that may mark for the slots'
        last owners."""
        slots, self._allocated = self._allocated, []
        if not slots:
            return
        if slots[0].device.type != "cpu":
            stream = torch.get_device_module(slots[0].device).current_stream()
            for some in slots:
                some.record_stream(stream)
        self._set(torch.cat(slots) if len(slots) > 1 else slots[0], False)

    def mark(self, spans: Sequence[tuple[Req, int, int]]) -> None:
        """Marks the prompts' part of (request, start, end) spans with draft KV; ``settle`` marks
        the answers' part."""
        slots = [
            self._table[req.kv.req_pool_idx, start : min(end, req.parse_state.prefilled_len)]
            for req, start, end in spans
            if start < req.parse_state.prefilled_len
        ]
        if slots:
            self._set(torch.cat(slots), True)

    def settle(self, req: Req, end: int) -> None:
        """Marks an answer that is over, before the radix cache takes its first ``end`` tokens."""
        state: RequestState = req.parse_state
        row, first = self._table[req.kv.req_pool_idx], state.prefilled_len
        known = max(first, min(state.draft_kv_len, end))
        if known > first:
            self._set(row[first:known], True)

    def _set(self, slots: torch.Tensor, mark: bool) -> None:
        # ``self._marked[slots] = mark`` would copy ``mark`` to the device, and wait for it.
        self._marked.index_fill_(0, slots.long(), mark)

    def look_up(self, reqs: Sequence[Req]) -> None:
        """Records how far the requests' prompts have draft KV. Waits for the device unless none of
        them can have any: the radix cache gave no slots, and the draft model has not run."""
        known = [req for req in reqs if req.cached_tokens or req.parse_state.draft_kv_len]
        lengths = self._marked_lengths(known) if known else []
        found = dict(zip(map(id, known), lengths, strict=True))
        for req in reqs:
            # Until SGLang knows the token that its last prefill chose, the radix cache may replace
            # the prompt's slots by others with the same tokens.
            num_prefilled = req.parse_state.prefilled_len - len(req.origin_input_ids)
            is_sure = len(req.output_ids) > num_prefilled
            req.parse_state.record_draft_kv(found.get(id(req), 0), is_sure=is_sure)

    def _marked_lengths(self, reqs: Sequence[Req]) -> list[int]:
        device = self._table.device
        lengths = [req.parse_state.prefilled_len for req in reqs]
        rows = on_device([req.kv.req_pool_idx for req in reqs], device)
        marks = self._marked[self._table[rows, : max(lengths)]]
        marks &= torch.arange(max(lengths), device=device) < on_device(lengths, device)[:, None]
        return HostCopy(marks.to(torch.int32).cumprod(dim=1).sum(dim=1)).tolist()
