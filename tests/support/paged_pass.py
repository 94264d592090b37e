"""A verify pass over random KV, with its reference output for every backend.

Imported by the tests of the backends; the requests' slots lie in no order.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sglang_parse.core.block import Masks
from sglang_parse.core.layout import RequestLayout, VerifyLayout
from sglang_parse.core.mask import flat_mask, flat_mask_at, may_attend, qlen_only_mask
from support.passes import block

HEADS, KV_HEADS, DIM, SLOTS = 4, 2, 16, 128
ROPE = 8
"""Of latent KV, what is behind the entries that are keys and values."""
WINDOW = 4
LAYOUT = VerifyLayout.of(
    [
        RequestLayout(5, 4, (2, 4), (2, 3)),
        RequestLayout(3, 1),
        RequestLayout(0, 3, (1, 2, 3), (1, 1, 2)),
        RequestLayout(40, 6, (0, 6, 3), (2, 1, 4)),
    ]
)
"""Questions over none, some or all of their draft; a request that only decodes; no prefix."""
BLOCKS = VerifyLayout.of(
    [
        block(9, Masks.EVERY, 4),
        block(0, Masks.EVERY, 2),
        block(20, Masks.LAST, 4),
        block(7, Masks.NONE),
    ]
)
"""Forwards of a parallel draft."""
ON_DEVICE = VerifyLayout.of([block(length, Masks.EVERY, 3) for length in (9, 0, 20, 7)])
"""Such forwards of one width, launched without a sync in between."""
CHAINS = VerifyLayout.of([RequestLayout(length, 5) for length in (9, 0, 20, 7)])
"""Causal passes of one width."""
RAGGED = VerifyLayout.of([RequestLayout(*span) for span in ((9, 5), (0, 1), (20, 3), (7, 2))])
"""Causal passes of several widths in one graph."""
UNKNOWN = 6
"""By how much the host's upper bounds exceed their context lengths."""


class PagedPass:
    """Pools, tables and inputs of one pass, in the form of SGLang's backends.

    ``ON_DEVICE``: only the device knows the lengths of its contexts.

    Args:
        window: of its layer: how many tokens before itself a row attends to.
        is_latent: one KV head, whose values are the first entries of its keys.
    """

    def __init__(
        self,
        is_masked: bool,
        layout: VerifyLayout = LAYOUT,
        window: int | None = None,
        is_latent: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        num_heads, dim = (1, DIM + ROPE) if is_latent else (KV_HEADS, DIM)
        self.window, self.is_latent = window, is_latent

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.layout = layout
        self.keys, self.values = random(SLOTS, num_heads, dim), random(SLOTS, num_heads, DIM)
        self.table = torch.zeros(8, 64, dtype=torch.int32)
        self.pool_indices = torch.tensor([6, 1, 3, 5])
        self.new_slots = self._deal_slots(torch.randperm(SLOTS, generator=generator))
        rows = layout.num_rows
        # As SGLang's RadixAttention hands them on.
        self.q = random(rows, HEADS * dim)
        self.k, self.v = random(rows, num_heads, dim), random(rows, num_heads, DIM)
        if is_latent:
            self.values, self.v = self.keys[..., :DIM], self.k[..., :DIM]
        self.layer = SimpleNamespace(
            layer_id=0,
            tp_q_head_num=HEADS,
            tp_k_head_num=num_heads,
            tp_v_head_num=num_heads,
            head_dim=dim,
            qk_head_dim=dim,
            v_head_dim=DIM,
            scaling=DIM**-0.5,
            sliding_window_size=window,
        )
        self.forward_batch = self._forward_batch(is_masked)

    def _deal_slots(self, order: torch.Tensor) -> torch.Tensor:
        new, taken = [], 0
        for index, request in zip(self.pool_indices, self.layout.requests, strict=True):
            slots = order[taken : taken + request.kv_len]
            taken += request.kv_len
            self.table[index, : request.kv_len] = slots.to(torch.int32)
            new.append(slots[request.prefix_len :])
        return torch.cat(new)

    def _forward_batch(self, is_masked: bool) -> Any:
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        from sglang_parse.attention.spec_input import LAID_OUT, ParseVerifyInput

        requests = self.layout.requests
        lens = torch.tensor([r.kv_len for r in requests])
        prefix_lens = [r.prefix_len for r in requests]
        on_host, starts, mask = self.layout, None, flat_mask(self.layout)
        if self.layout is ON_DEVICE:
            on_host = self.layout.at([length + UNKNOWN for length in prefix_lens])
            starts = torch.tensor(prefix_lens)
            mask = flat_mask_at(on_host, starts, qlen_only_mask(on_host.requests[0]))
        spec_info = ParseVerifyInput(
            layout=on_host,
            custom_mask=mask if is_masked else None,
            select_index=torch.tensor([0]),
            starts=starts,
        )
        known = torch.tensor([r.kv_len for r in on_host.requests])
        batch = ForwardBatch(
            forward_mode=LAID_OUT,
            batch_size=len(requests),
            input_ids=torch.zeros(self.layout.num_rows, dtype=torch.int64),
            req_pool_indices=self.pool_indices,
            seq_lens=lens,
            seq_lens_cpu=known,
            seq_lens_sum=int(known.sum()),
            out_cache_loc=self.new_slots,
            spec_info=spec_info,
        )
        batch.extend_prefix_lens_cpu = [r.prefix_len for r in on_host.requests]
        batch.extend_seq_lens_cpu = [r.num_rows for r in requests]
        batch.extend_prefix_lens = torch.tensor(prefix_lens)
        batch.extend_seq_lens = torch.tensor(batch.extend_seq_lens_cpu)
        return batch

    @property
    def pool(self) -> Any:
        """A KV pool of one layer."""

        def write(_layer: Any, loc: Any, k: torch.Tensor, v: torch.Tensor, *_scales: None) -> None:
            self.keys[loc.loc] = k
            if not self.is_latent:
                self.values[loc.loc] = v

        return SimpleNamespace(
            get_key_buffer=lambda _: self.keys,
            get_value_buffer=lambda _: self.values,
            get_kv_buffer=lambda _: (self.keys, self.values),
            set_kv_buffer=write,
            set_mla_kv_buffer=lambda layer, loc, k, k_rope: write(
                layer, loc, torch.cat((k, k_rope), -1), None
            ),
        )

    def expected(self) -> torch.Tensor:
        """[rows, HEADS * DIM], row by row and head by head; after the new KV is written."""
        query = self.q.view(-1, HEADS, self.layer.head_dim)
        outputs = []
        for i, request in enumerate(self.layout.requests):
            slots = self.table[self.pool_indices[i]].long()
            first = self.layout.qo_indptr[i]
            for row in range(request.num_rows):
                seen = [c for c in range(request.kv_len) if self._sees(request, row, c)]
                outputs.append(self._attend(query[first + row], slots[seen]))
        return torch.stack(outputs)

    def _sees(self, request: RequestLayout, row: int, column: int) -> bool:
        places = [*range(request.prefix_len), *request.positions()]
        distance = places[request.prefix_len + row] - places[column]
        is_near = self.window is None or distance <= self.window
        return is_near and may_attend(request, row, column)

    def _attend(self, query: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        heads = []
        for head in range(HEADS):
            kv_head = head // (HEADS // self.layer.tp_k_head_num)
            weights = torch.softmax(self.keys[slots, kv_head] @ query[head] / DIM**0.5, dim=0)
            heads.append(weights @ self.values[slots, kv_head])
        return torch.cat(heads)

    def check(self, output: torch.Tensor) -> None:
        """Asserts a backend's output and the KV that it wrote."""
        assert torch.equal(self.keys[self.new_slots], self.k)
        torch.testing.assert_close(output, self.expected(), atol=1e-5, rtol=1e-5)
