"""The EAGLE-3 head as the worker drives it: its faults contained, nothing at all without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_parse.engine.faults import DraftGuard
from sglang_parse.engine.head import Eagle3Head, Written


class GuardedHead:
    """A server's EAGLE-3 head, or the lack of one: every call is allowed, and then does nothing.

    Args:
        head: the head; None where the target goes on alone.
        num_ranks: see ``DraftGuard``.
    """

    def __init__(self, head: Eagle3Head | None, num_ranks: int) -> None:
        self.head = head
        self._guard = DraftGuard(num_ranks, model="the EAGLE-3 head")

    @property
    def captures(self) -> bool:
        """Whether the target's forwards must keep what a head reads."""
        return self.head is not None

    def prefill(self, batch: Any, result: GenerationBatchResult) -> None:
        """Follow the target's prefill; takes the captured states out of ``result``."""
        if self.head is None:
            return
        output = result.logits_output
        hidden, output.hidden_states = output.hidden_states, None  # nobody asked for them
        with self._guard.contain(batch.reqs):
            self.head.prefill(batch, hidden, result.next_token_ids)

    def propose(self, batch: Any, rows: Sequence[int]) -> dict[int, list[int]]:
        """Row -> what the head proposes; nothing where it failed."""
        proposals: dict[int, list[int]] = {row: [] for row in rows}
        if self.head is not None and rows:
            with self._guard.contain([batch.reqs[row] for row in rows], is_burst=True):
                proposals.update(zip(rows, self.head.propose(batch, rows), strict=True))
        return proposals

    def follow(
        self,
        batch: Any,
        places: Sequence[tuple[int, int]],
        hidden: torch.Tensor | None,
        emitted: Sequence[Sequence[int]],
    ) -> None:
        """Follow what has been written.

        Args:
            places: (row in the batch, its first row in ``hidden``) of the requests.
            hidden: the target's captured states; None without a head.
            emitted: per row of the batch its new tokens.
        """
        if self.head is None or hidden is None:
            return
        written = [
            Written(row, emitted[row], hidden[start : start + len(emitted[row])])
            for row, start in places
            if emitted[row] and not batch.reqs[row].lora_id
        ]
        with self._guard.contain([batch.reqs[part.row] for part in written]):
            self.head.follow(batch, written)

    def alloc_memory_pool(self, **pools: Any) -> None:
        if self.head is not None:
            self.head.alloc_memory_pool(**pools)

    def init_attention_backends(self) -> None:
        if self.head is not None:
            self.head.init_attention_backends()

    def init_cuda_graphs(self) -> None:
        if self.head is not None:
            self.head.init_cuda_graphs()
