"""Which KV slots hold the draft model's KV.

The draft model reads a sequence when it is about to write on it, not before: requests that never
draft, and those whose drafts do not pay, cost it nothing. The radix cache hands out slots whoever
wrote them; so there is a mark for each, and a request's drafts begin with the question how far the
marks go. What is missing behind them is ``DraftModel.catch_up``'s.

Marks are read only of slots that a sequence has, and right for all slots that the radix cache may
take: a prefill's when it begins (nothing is written) and when the draft model reads of it, an
answer's when it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_parse.core.request import RequestState
from sglang_parse.device import HostCopy, on_device


class DraftKv:
    """The marks of one server's slots.

    Args:
        table: SGLang's ``req_to_token``, on the device.
        num_slots: slot numbers are below it.
    """

    def __init__(self, table: torch.Tensor, num_slots: int) -> None:
        self._table = table
        self._written = torch.zeros(num_slots, dtype=torch.bool, device=table.device)

    def clear(self, slots: torch.Tensor) -> None:
        """Other tokens are in these slots from here on: int [n], on the device."""
        self._written[slots] = False

    def mark_read(self, spans: Sequence[tuple[Any, int, int]]) -> None:
        """The draft model has read tokens of requests: (request, start, end) each. What is the
        prompt's of them is marked; what an answer's slots hold, ``settle`` will know."""
        slots = [
            self._table[req.kv.req_pool_idx, start : min(end, req.parse_state.prefilled_len)]
            for req, start, end in spans
            if start < req.parse_state.prefilled_len
        ]
        if slots:
            self._mark(torch.cat(slots))

    def settle(self, req: Any, end: int) -> None:
        """An answer is over, and the radix cache may take its first ``end`` tokens."""
        state: RequestState = req.parse_state
        row, first = self._table[req.kv.req_pool_idx], state.prefilled_len
        known = max(first, min(state.draft_kv_len, end))
        if known > first:
            self._mark(row[first:known])
        if end > known:
            self.clear(row[known:end])

    def find(self, reqs: Sequence[Any]) -> None:
        """How far the draft's KV of their prompts goes before the first token that lacks it; waits
        for the device."""
        device = self._table.device
        lengths = [req.parse_state.prefilled_len for req in reqs]
        rows = on_device([req.kv.req_pool_idx for req in reqs], device)
        for req, length in zip(reqs, self._leading(rows, lengths), strict=True):
            req.parse_state.find_draft_kv(length, is_sure=_is_prefill_processed(req))

    def _leading(self, rows: torch.Tensor, lengths: Sequence[int]) -> list[int]:
        """How many of the first ``lengths`` slots of rows of the table are marked before the first
        that is not."""
        device, longest = self._table.device, max(lengths)
        ends = on_device(lengths, device)
        marks = self._written[self._table[rows, :longest]]
        marks &= torch.arange(longest, device=device) < ends[:, None]
        return HostCopy(marks.to(torch.int32).cumprod(dim=1).sum(dim=1)).tolist()

    def _mark(self, slots: torch.Tensor) -> None:
        """The draft model has written the KV of the tokens there: int [n], on the device."""
        self._written[slots] = True


def _is_prefill_processed(req: Any) -> bool:
    """Whether SGLang knows the token that its last prefill chose. Until then the radix cache may
    put others' slots, of the same tokens, in the place of the prompt's."""
    num_prefilled = req.parse_state.prefilled_len - len(req.origin_input_ids)
    return len(req.output_ids) > num_prefilled
