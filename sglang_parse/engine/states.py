"""Recurrent states of a hybrid target: what a verify pass changes in them, and how it returns.

Linear attention, Mamba and short convolutions have one state per request, which every row of a
forward advances in place. KV of a rejected token is overwritten by the next one's; the token's part
of a state is not. So states are copied before a pass verifies drafts:

    kept whole      the state has consumed what was output: the copy is forgotten
    kept in part    the copy is put back, and the request's next forward starts with the tokens
    or not at all   that were output since (``RequestState.state_lag``), of a decode step or a pass

No iteration is in flight when the next one is planned, so that a copy lives for one iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.runtime_context import get_memory, get_schedule

from sglang_parse.device import on_device
from sglang_parse.engine.forward import RequestRows, decode_rows, forward_spans, run_forward
from sglang_parse.engine.requests import is_complete
from sglang_parse.engine.sglang_types import Req, ScheduleBatch
from sglang_parse.engine.target import TargetModel
from sglang_parse.startup.states import num_copies

MAX_LAG = 64
"""Tokens that a pass may repeat. More are repeated by a forward of their own, which costs about as
much as a decode step, so that the next copy is of the state behind them."""


class StateKeeper:
    """Copies of the target's states, and their return.

    Args:
        target: a hybrid model, whose pools are allocated.

    Attributes:
        num_copies: how many drafts a pass may verify.
    """

    def __init__(self, target: TargetModel) -> None:
        self.target = target
        self._pool: HybridReqToTokenPool = target.runner.req_to_token_pool
        cache = self._pool.mamba_pool.mamba_cache
        self._states: list[torch.Tensor] = [*cache.conv, cache.temporal]  # [layers, slots, ...]
        self.num_copies = num_copies(get_schedule())
        self._copies = [state[:, : self.num_copies].clone() for state in self._states]
        self._copied: dict[int, int] = {}

    def save(self, batch: ScheduleBatch, indices: Sequence[int]) -> None:
        """Before a pass: copies the states of the requests ``indices`` of the batch."""
        self.catch_up(batch, [i for i in indices if batch.reqs[i].parse_state.state_lag > MAX_LAG])
        self._copied = {index: place for place, index in enumerate(indices)}
        if not indices:
            return
        slots = self._slots(batch, indices)
        for state, copy in zip(self._states, self._copies, strict=True):
            torch.index_select(state, 1, slots, out=copy[:, : len(indices)])

    def settle(
        self, batch: ScheduleBatch, parts: Sequence[RequestRows], tokens: Sequence[Sequence[int]]
    ) -> None:
        """After a forward: puts back the states of drafts that were not kept whole.

        Args:
            parts: its rows.
            tokens: per request of the batch what was output.
        """
        returned = []
        for part in parts:
            index, count = part.index, part.num_token_rows  # from the anchor on
            state = batch.reqs[index].parse_state
            is_kept = len(tokens[index]) == count
            if is_kept or index not in self._copied:
                state.lag_state(len(tokens[index]) - count)  # below 0 after a fault
            else:
                state.lag_state(state.state_lag + len(tokens[index]))
                returned.append(index)
        self._put_back(batch, returned)
        self._copied = {}
        if not get_memory().disable_radix_cache:  # for the next turn
            self.catch_up(batch, [i for i in returned if _has_answered(batch.reqs[i])])

    def catch_up(self, batch: ScheduleBatch, indices: Sequence[int]) -> None:
        """Repeats the tokens that the states of the requests ``indices`` lack."""
        parts = [decode_rows(i, batch.reqs[i], num_anchors=0) for i in indices]
        for span in forward_spans(self.target.runner, parts):
            run_forward(self.target, batch, parts[span], is_masked=False)
        for i in indices:
            batch.reqs[i].parse_state.lag_state(0)

    def _put_back(self, batch: ScheduleBatch, indices: Sequence[int]) -> None:
        if not indices:
            return
        for index, slot in zip(indices, self._slots(batch, indices).split(1), strict=True):
            place = self._copied[index]
            for state, copy in zip(self._states, self._copies, strict=True):
                state.index_copy_(1, slot, copy[:, place : place + 1])

    def _slots(self, batch: ScheduleBatch, indices: Sequence[int]) -> torch.Tensor:
        """int64 [n] the requests' slots in the pool of states."""
        rows = batch.req_pool_indices[on_device(indices, batch.device)]
        return self._pool.get_mamba_indices(rows).to(torch.int64)


def _has_answered(req: Req) -> bool:
    return bool(req.parse_state.state_lag) and not req.parse_state.fault and is_complete(req)


def keeper_of(target: TargetModel) -> StateKeeper | None:
    """None for a target without recurrent states."""
    pool: Any = target.runner.req_to_token_pool
    return StateKeeper(target) if isinstance(pool, HybridReqToTokenPool) else None
