"""Draft chunks of blocks: several tokens per forward, from a draft model that fills mask tokens.

``core.block`` defines a forward's rows, ``core.block_accept`` what is accepted of it. A forward
runs like a verify pass, in the requests' KV slots. The KV of accepted candidates stays; the
next forward overwrites what follows it.

Every block of a layout has the same rows, wherever it starts, and its acceptance stays on the
device. So the next block can be launched at once: the host knows only the highest position it may
start at, K tokens per block, and attention reads the lengths on the device
(``ParseVerifyInput.starts``). Where the backend plans attention on the host, the host waits for
each block. The first block of a draft also computes KV of known tokens that lack it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_parse.attention.spec_input import VERIFY_MODE, ParseVerifyInput
from sglang_parse.core.block import DraftLayout
from sglang_parse.core.block_accept import ChainState, accept_blocks, accepted_block
from sglang_parse.core.layout import RequestLayout, VerifyLayout
from sglang_parse.core.mask import flat_mask, flat_mask_at, qlen_only_mask
from sglang_parse.core.request import RequestState
from sglang_parse.device import on_device
from sglang_parse.engine.adjust import adjust
from sglang_parse.engine.batch import max_forward_rows, spans_within
from sglang_parse.engine.broadcast import broadcast_tokens
from sglang_parse.engine.drafting.chunk import DraftChunk, adjusted_rows, length
from sglang_parse.engine.drafting.draft_model import DraftModel, extend_batch
from sglang_parse.engine.faults import nan_rows
from sglang_parse.engine.forward import max_logits_rows
from sglang_parse.engine.requests import sequence_slice
from sglang_parse.engine.sampling import PreparedRows, prepare_rows
from sglang_parse.engine.sglang_types import Req, ScheduleBatch


class ParallelChunk(DraftChunk):
    """A draft chunk of blocks.

    Args:
        mask_id: the draft's mask token.
        is_masked: run masks after every row in the layout ``mask``, otherwise in ``alias``.
        others: as for ``DraftChunk``.
    """

    def __init__(self, *others: Any, mask_id: int, is_masked: bool, **more: Any) -> None:
        super().__init__(*others, **more)
        self._mask_id, self._is_masked = mask_id, is_masked
        self._state: ChainState | None = None
        self._blocks: _Blocks | None = None

    def _launch(self, rows: Sequence[int], num_blocks: int, before: DraftChunk | None) -> None:
        reqs, state, blocks = self._reqs(rows), self._state, self._blocks
        records: list[torch.Tensor] = []
        if blocks is None or blocks.rows != rows:
            state = before.state_of(reqs) if isinstance(before, ParallelChunk) else None
            blocks = _Blocks(
                *(self.model, self.layout, self.batch, rows),
                mask_id=self._mask_id,
                is_masked=self._is_masked,
                is_known=state is None,
            )
        else:  # the host has waited for the block before, and no draft has ended
            blocks.start_here()
        for number in range(num_blocks):
            if records and number == num_blocks - 1:
                self._send(rows, records)
                records.clear()
            if state is None:
                state, record = blocks.run_first()
            else:
                state, record = blocks.run(state, number)
            records.append(record)
            self.num_forwards += 1
        self._send(rows, records)
        self._state, self._blocks = state, blocks
        for req in reqs:
            req.parse_state.launch_draft(self.layout.size * num_blocks)

    def state_of(self, reqs: Sequence[Req]) -> ChainState:
        """Returns the state after its blocks for some of its requests."""
        assert self._state is not None
        return self._state.pick(on_device(self.places(reqs), self.batch.device))

    def _receive(self, state: RequestState, values: Sequence[Sequence[int]], budget: int) -> None:
        for record in values:
            accepted, candidates = accepted_block(record)
            state.add_draft(accepted, budget, num_launched=self.layout.size, candidates=candidates)


@dataclass(frozen=True, slots=True)
class _Span:
    """Requests whose blocks share a forward.

    Attributes:
        place: the requests among those of the chunk.
        sampled: sampling parameters of the rows that may be sampled.
        every_row: int64 [rows of the forward] counted from 0.
        lens: int32 [2, n] rows of each request, and the first of them.
    """

    place: slice
    sampled: PreparedRows
    every_row: torch.Tensor
    lens: torch.Tensor


class _Blocks:
    """Forwards of one block after another, for some requests.

    Args:
        model: the draft model.
        layout: layout of the blocks.
        batch: the scheduler's batch.
        rows: [n] the requests' rows of the batch.
        mask_id, is_masked: as for ``ParallelChunk``.
        is_known: the host knows where the first block starts.
    """

    def __init__(
        self,
        model: DraftModel,
        layout: DraftLayout,
        batch: ScheduleBatch,
        rows: Sequence[int],
        *,
        mask_id: int,
        is_masked: bool,
        is_known: bool,
    ) -> None:
        self._model, self._layout, self._mask_id = model, layout, mask_id
        self._batch, self.rows, device = batch, rows, batch.device
        self._reqs = [batch.reqs[row] for row in rows]
        self._wide = layout.rows(0)
        self._width = width = self._wide.num_rows
        self._has_mask = is_masked and not self._wide.is_causal
        self._last_position = model.draft_runner.model_config.context_len - 1
        self.start_here()
        self._num_pending = [
            max(1, start + 1 - req.parse_state.draft_kv_len) if is_known else 1
            for req, start in zip(self._reqs, self._starts, strict=True)
        ]
        self._limits_cpu = [req.kv.kv_allocated_len - width for req in self._reqs]
        pools = [req.kv.req_pool_idx for req in self._reqs]
        self._pools, self._limits = on_device([pools, self._limits_cpu], device).unbind()
        self._offsets = on_device(self._wide.positions(), device)
        self._columns = torch.arange(width, device=device)
        self._has_seeds = batch.sampling_info.sampling_seed is not None
        num_sampled = width if self._has_seeds else layout.size
        sizes = [(width + count - 1, width) for count in self._num_pending]
        limits = (max_forward_rows(), max_logits_rows(model.draft_runner))
        self._spans = [
            self._span(place, [row for row in rows[place] for _ in range(num_sampled)])
            for place in spans_within(sizes, limits)
        ]

    def _span(self, place: slice, sampled_rows: Sequence[int]) -> _Span:
        num_reqs, device = place.stop - place.start, self._columns.device
        every_row = torch.arange(num_reqs * self._width, device=device)
        first_rows = every_row[:: self._width].to(torch.int32)
        lens = torch.stack((torch.full_like(first_rows, self._width), first_rows))
        sampled = prepare_rows(self._model.draft_runner, self._batch, sampled_rows)
        return _Span(place, sampled, every_row, lens)

    def start_here(self) -> None:
        """Counts blocks from what the host knows of the drafts."""
        self._starts = [length(req) - 1 for req in self._reqs]
        """Position of the last accepted token before the first block, at most."""

    # -- blocks -----------------------------------------------------------------

    def run_first(self) -> tuple[ChainState, torch.Tensor]:
        """Runs a block of each request whose state the host knows; returns as ``accept_blocks``."""
        num_masks, known = self._layout.size - 1, []
        for req, start in zip(self._reqs, self._starts, strict=True):
            candidates = req.parse_state.draft.candidates
            padded = [*candidates, *[self._mask_id] * (num_masks - len(candidates))]
            known.append([start, *_tokens(req, start, start + 1), len(candidates), *padded])
        sent = on_device(known, self._columns.device)
        state = ChainState(sent[:, 0], sent[:, 1], sent[:, 3:], sent[:, 2])
        result = self._run(state, self._first_batch)
        spans = zip(self._reqs, self._starts, self._num_pending, strict=True)
        self._model.kv.mark([(req, end + 1 - count, end + 1) for req, end, count in spans])
        return result

    def run(self, state: ChainState, number: int) -> tuple[ChainState, torch.Tensor]:
        """Runs block ``number`` of each request; returns as ``accept_blocks``."""
        # No block goes past its slots: the draft is over there, and what follows is dropped.
        state = state._replace(starts=torch.minimum(state.starts, self._limits))
        longest = [
            min(start + self._layout.size * number, limit)
            for start, limit in zip(self._starts, self._limits_cpu, strict=True)
        ]
        return self._run(state, partial(self._next_batch, longest))

    def _run(
        self, state: ChainState, new_batch: Callable[[_Span, ChainState], ForwardBatch]
    ) -> tuple[ChainState, torch.Tensor]:
        choices = [self._forward(span, state.pick(span.place), new_batch) for span in self._spans]
        return accept_blocks(self._layout.masks, state, torch.cat(choices), self._mask_id)

    def _forward(
        self,
        span: _Span,
        state: ChainState,
        new_batch: Callable[[_Span, ChainState], ForwardBatch],
    ) -> torch.Tensor:
        """int64 [n, width] choices of the rows, ``NO_TOKEN`` where logits held a NaN."""
        logits = self._model.run(new_batch(span, state))
        is_bad = nan_rows(logits)
        # Rows of masks, too: what they propose follows all candidates.
        adjust(logits, adjusted_rows(self._reqs[span.place], self._width, candidates=True))
        return broadcast_tokens(self._choose(span, logits, state), is_bad).view(-1, self._width)

    def _choose(self, span: _Span, logits: torch.Tensor, state: ChainState) -> torch.Tensor:
        """int64 [n * width] tokens. Real rows are sampled as one token per forward would be. Mask
        rows may propose anything: their most likely token, or with a seed, whose noise depends on
        the position, the token sampled there."""
        if span.sampled.is_argmax:
            return logits.argmax(dim=-1)
        positions = self._positions(state)
        if self._has_seeds:
            return span.sampled.sample(logits, positions.flatten())[0]
        size = self._layout.size
        tokens = logits.argmax(dim=-1).view(-1, self._width)
        real = logits.view(len(tokens), self._width, -1)[:, :size].flatten(0, 1)
        sampled, _ = span.sampled.sample(real, positions[:, :size].flatten())
        is_real = self._columns[:size] <= state.num_candidates[:, None]
        tokens[:, :size] = torch.where(is_real, sampled.view(-1, size), tokens[:, :size])
        return tokens.flatten()

    # -- forwards ---------------------------------------------------------------

    def _first_batch(self, span: _Span, _: ChainState) -> ForwardBatch:
        """A forward of which the host knows all rows: tokens without KV, then the block."""
        device, place = self._columns.device, span.place
        reqs = self._reqs[place]
        parts: list[RequestLayout] = []
        ids: list[int] = []
        columns: list[int] = []
        pools: list[int] = []
        select: list[int] = []
        for req, start, count in zip(
            reqs, self._starts[place], self._num_pending[place], strict=True
        ):
            parts.append(part := self._layout.rows(start + 1 - count, count))
            candidates = req.parse_state.draft.candidates
            num_masks = part.num_rows - count - len(candidates)
            ids += _tokens(req, part.prefix_len, start + 1)
            ids += [*candidates, *[self._mask_id] * num_masks]
            columns += range(part.prefix_len, part.kv_len)
            pools += [req.kv.req_pool_idx] * part.num_rows
            select += range(len(ids) - self._width, len(ids))
        layout = VerifyLayout.of(parts)
        rows = on_device([ids, layout.positions(), columns, pools], device)
        prefix_lens, lens = ([getattr(p, n) for p in parts] for n in ("prefix_len", "num_rows"))
        numbers = on_device([prefix_lens, lens, layout.qo_indptr[:-1]], device)
        spec_info = ParseVerifyInput(
            layout=layout,
            custom_mask=flat_mask(layout, device) if self._has_mask else None,
            select_index=on_device(select, device),
        )
        forward_batch = self._model.new_batch(
            VERIFY_MODE,
            pools=self._pools[place],
            ids=rows[0],
            positions=rows[1].clamp(max=self._last_position),
            slots=self._model.req_to_token[rows[3], rows[2]].to(torch.int64),
            seq_lens=numbers[0] + numbers[1],
            seq_lens_cpu=[part.kv_len for part in parts],
            spec_info=spec_info,
        )
        return extend_batch(forward_batch, numbers.to(torch.int32), prefix_lens, lens)

    def _next_batch(self, most: Sequence[int], span: _Span, state: ChainState) -> ForwardBatch:
        """A forward of which the host knows the shape, and ``most`` of where blocks start."""
        pools, longest = self._pools[span.place], most[span.place]
        layout = VerifyLayout.of([self._wide.at(start) for start in longest])
        mask = flat_mask_at(layout, state.starts, self._tail) if self._has_mask else None
        real = torch.cat((state.last[:, None], state.candidates), 1)
        num_masks = self._width - real.shape[1]
        columns = state.starts[:, None] + self._columns
        forward_batch = self._model.new_batch(
            VERIFY_MODE,
            pools=pools,
            ids=torch.nn.functional.pad(real, (0, num_masks), value=self._mask_id).flatten(),
            positions=self._positions(state).flatten(),
            slots=self._model.req_to_token[pools[:, None], columns].flatten().to(torch.int64),
            seq_lens=state.starts + self._width,
            seq_lens_cpu=[part.kv_len for part in layout.requests],
            spec_info=ParseVerifyInput(
                layout=layout,
                custom_mask=mask,
                select_index=span.every_row,
                starts=state.starts,
            ),
        )
        numbers = torch.cat((state.starts[None].to(torch.int32), span.lens))
        return extend_batch(forward_batch, numbers, longest, [self._width] * len(longest))

    @cached_property
    def _tail(self) -> torch.Tensor:
        return qlen_only_mask(self._wide, self._columns.device)

    def _positions(self, state: ChainState) -> torch.Tensor:
        """int64 [n, width] of a block's rows, within the model's context."""
        return (state.starts[:, None] + self._offsets).clamp_(max=self._last_position)


def _tokens(req: Req, start: int, end: int) -> list[int]:
    return sequence_slice(req, start, end, req.parse_state.draft.token_ids)
