"""Draft chunks of blocks: several tokens per forward, from a draft model that fills mask tokens, or
has an EAGLE-3 head (``draft_head``).

``core.block`` defines a forward's rows, ``core.block_accept`` what is accepted of it. A forward
runs like a verify pass, in the requests' KV slots. The KV of accepted candidates stays; the
next forward overwrites what follows it.

All blocks of a kind have the same rows, wherever it starts, and its acceptance stays on the
device. So the next block can be launched at once: the host knows only the highest position it may
start at, K tokens per block, and attention reads the lengths on the device
(``ParseVerifyInput.starts``). Where the backend plans attention on the host, the host waits for
each block. On a GPU a block is one CUDA graph (``block_graphs``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import compress

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_parse.core.block import BlockKind
from sglang_parse.core.block_accept import (
    BlockRows,
    ChainState,
    accept_blocks,
    accepted_block,
    chain_ids,
    propose,
)
from sglang_parse.core.layout import VerifyLayout
from sglang_parse.core.mask import flat_mask_at, qlen_only_mask
from sglang_parse.core.request import RequestState
from sglang_parse.device import on_device
from sglang_parse.engine.batch import max_forward_rows, spans_within
from sglang_parse.engine.broadcast import broadcast
from sglang_parse.engine.drafting.batches import block_batch
from sglang_parse.engine.drafting.block_graphs import BlockGraphs
from sglang_parse.engine.drafting.chunk import DraftChunk, adjusted_rows, length
from sglang_parse.engine.drafting.draft_model import DraftModel, tokens_of
from sglang_parse.engine.drafting.draft_prefill import kv_len, prefill_up_to
from sglang_parse.engine.faults import mark_faults, nan_rows
from sglang_parse.engine.forward import max_logits_rows
from sglang_parse.engine.logits.adjust import adjust
from sglang_parse.engine.logits.sampling import PreparedRows, prepare_rows, surprisals_of
from sglang_parse.engine.requests import is_adjusted
from sglang_parse.engine.sglang_types import Req, ScheduleBatch

BLOCKS_AHEAD = 2
"""Blocks of a chunk that run while the host plans and launches the next one: this takes it 2.6 ms
on an H200 where a block takes 1.9."""
Rows = tuple[torch.Tensor, ...]
Run = Callable[[], Rows]


class ParallelChunk(DraftChunk):
    _state: ChainState | None = None
    _blocks: _Blocks | None = None
    _num_brought = _num_used = 0

    @property
    def continued(self) -> tuple[float, float]:
        return self._num_brought / len(self.indices), self._num_used / len(self.indices)

    def _launch(self, indices: Sequence[int], num_blocks: int, before: DraftChunk | None) -> None:
        reqs, state, blocks = self._reqs(indices), self._state, self._blocks
        records: list[torch.Tensor] = []
        if blocks is None or blocks.indices != indices:
            state = before.state_of(reqs) if isinstance(before, ParallelChunk) else None
            blocks = _Blocks(self.model, self.kind, self.batch, indices)
        else:  # the host has waited for the block before, and no draft has ended
            blocks.start_here()
        state = state or blocks.known_state()
        looks = self._looks(reqs)
        for number in range(1, num_blocks + 1):
            state, record = blocks.run(state, number - 1)
            records.append(record)
            self.num_forwards += 1
            if looks or number in (num_blocks - BLOCKS_AHEAD, num_blocks):
                self._send(indices, records)
                records.clear()
            if looks and number < num_blocks and not self._goes_on(reqs, before):
                break
        self._state, self._blocks = state, blocks

    def _num_possible(self, req: Req, num_forwards: int) -> int:
        # A block that does not fit starts at the last place where one does. That is wrong unless
        # the draft is over there: the planner may have granted slots for the chunk's tokens only.
        first, last = length(req) - 1, req.kv.kv_allocated_len - 1 - self.kind.lookahead_rows
        if last >= req.parse_state.committed_len + self._budget(req) - 1:
            return num_forwards
        return min(num_forwards, (last - first) // self.kind.size + 1)

    def state_of(self, reqs: Sequence[Req]) -> ChainState:
        """Returns the state after its blocks for some of its requests."""
        assert self._state is not None
        return self._state.pick(on_device(self.places(reqs), self.batch.device))

    def _ids(self, steps: torch.Tensor, reqs: Sequence[Req]) -> torch.Tensor:
        rooms = [max(1, self._budget(req) - req.parse_state.num_drafted) for req in reqs]
        return chain_ids(steps, on_device(rooms, steps.device))

    def _receive(self, req: Req, values: Sequence[Sequence[int]], budget: int) -> None:
        state: RequestState = req.parse_state
        for record in values:
            count = state.num_drafted
            accepted, levels, candidates = accepted_block(record)
            state.add_draft(
                accepted,
                budget,
                num_launched=self.kind.size,
                levels=self._levels(req, levels),
                candidates=candidates,
            )
            if count and not state.is_over(budget):
                self._num_used += 1
                self._num_brought += state.num_drafted - count


@dataclass(frozen=True, slots=True)
class _Span:
    """Requests whose blocks share a forward.

    Attributes:
        place: the requests among those of the chunk.
        sampled: sampling parameters of the rows that may be sampled.
    """

    place: slice
    sampled: PreparedRows


class _Blocks:
    """Forwards of one block after another, for some requests.

    Args:
        indices: [n] the requests' indices of the batch.
    """

    def __init__(
        self, model: DraftModel, kind: BlockKind, batch: ScheduleBatch, indices: Sequence[int]
    ) -> None:
        self._model, self._kind = model, kind
        self._batch, self.indices, device = batch, indices, batch.device
        self._reqs = [batch.reqs[i] for i in indices]
        self._graphs = model.graphs_of(kind, len(indices))
        self._wide = kind.rows(0)
        self._width = width = self._wide.num_rows
        self._has_mask = model.is_masked and not self._wide.is_causal
        self.start_here()
        num_slots = 1 + kind.lookahead_rows
        self._limits_cpu = [req.kv.kv_allocated_len - num_slots for req in self._reqs]
        pools = [req.kv.req_pool_idx for req in self._reqs]
        self._pools, self._limits = on_device([pools, self._limits_cpu], device).unbind()
        self._columns = torch.arange(width, device=device)
        offsets = on_device(self._wide.positions(), device)
        last_position = model.draft_runner.model_config.context_len - 1
        self._block_rows = BlockRows(offsets, self._columns, model.mask_id, last_position)
        self._has_seeds = batch.sampling_info.sampling_seed is not None
        num_sampled = width if self._has_seeds else kind.size
        limits = (max_forward_rows(), max_logits_rows(model.draft_runner))
        self.spans = []
        for place in spans_within([(width, width)] * len(indices), limits):
            sampled = [i for i in indices[place] for _ in range(num_sampled)]
            self.spans.append(_Span(place, prepare_rows(model.draft_runner, batch, sampled)))

    def start_here(self) -> None:
        """Counts blocks from what the host knows of the drafts."""
        self._starts = [length(req) - 1 for req in self._reqs]
        """Position of the last accepted token before the first block, at most."""
        self._num_known = [0] * len(self._reqs)

    # -- blocks -----------------------------------------------------------------

    def known_state(self) -> ChainState:
        """The state of requests whose drafts the host knows; computes KV that is missing before
        their blocks."""
        num_masks, known, marks = self._kind.size - 1, [], []
        spans = zip(self._reqs, self._fill_gaps(), self._starts, strict=True)
        for place, (req, start, end) in enumerate(spans):
            first, *text = tokens_of(req, start, end + 1)
            self._num_known[place] = len(text)
            candidates = [*text, *req.parse_state.draft.candidates][:num_masks]
            padded = [*candidates, *[self._model.mask_id] * (num_masks - len(candidates))]
            known.append([start, first, len(candidates), len(text), *padded])
            marks.append((req, start, end + 1))
        self._model.kv.mark(marks)
        sent = on_device(known, self._columns.device)
        return ChainState(sent[:, 0], sent[:, 1], sent[:, 4:], sent[:, 2], sent[:, 3])

    def _fill_gaps(self) -> list[int]:
        """[n] the first tokens without KV; prefills text that is longer than a block's
        candidates."""
        ends = [*zip(self._reqs, self._starts, strict=True)]
        starts = [kv_len(self._model, req, end) for req, end in ends]
        gaps = [e - s >= self._kind.size for s, e in zip(starts, self._starts, strict=True)]
        if any(gaps):
            prefill_up_to(self._model, [*compress(ends, gaps)])
        spans = zip(starts, self._starts, gaps, strict=True)
        return [end if is_gap else start for start, end, is_gap in spans]

    def run(self, state: ChainState, number: int) -> tuple[ChainState, torch.Tensor]:
        """Runs block ``number`` of each request; returns as ``accept_blocks``."""
        if self._graphs is not None:
            done = self._graphs.run(state, self._pools, self._limits)
            self._model.replays = True
            if self._is_greedy:
                return done
        # No block goes past its slots: the draft is over there, and what follows is dropped.
        state = state._replace(starts=torch.minimum(state.starts, self._limits))
        blocks = [self.block(span, state.pick(span.place), number) for span in self.spans]
        choices, surprisals, proposed = map(torch.cat, zip(*blocks, strict=True))
        by_head = proposed if self._model.head is not None else None
        return accept_blocks(
            self._kind.masks, state, choices, surprisals, self._model.mask_id, by_head
        )

    def block(
        self, span: _Span, state: ChainState, number: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The choices [n, width] of block ``number``, of its replay or of a forward, the real rows'
        surprisals [n, K], and what a head proposes, [n, K - 1]; nothing without one."""
        longest = self.longest(number)[span.place]
        if self._graphs is not None:
            logits, hidden = self._graphs.output_of(span.place)
        else:
            output = self.forward(longest, state, span)
            logits, hidden = output.next_token_logits, output.hidden_states
        (choices, surprisals), head = self._choices(span, state, logits), self._model.head
        if head is None or hidden is None:
            return choices, surprisals, choices[:, :0]
        # Steps of the head start behind the block's tokens.
        longest = [start + 2 * self._kind.size for start in longest]
        forward = partial(head.forward, self._pools[span.place], longest)
        proposed = propose(forward, state, choices, hidden.unflatten(0, choices.shape))
        return choices, surprisals, broadcast(proposed)

    @property
    def _is_greedy(self) -> bool:
        """Whether every row's choice is its most likely token."""
        is_argmax = all(span.sampled.is_argmax for span in self.spans)
        return is_argmax and not any(map(is_adjusted, self._reqs))

    def longest(self, number: int) -> list[int]:
        """Where block ``number`` of each request starts, at most."""
        size = self._kind.size
        return [
            min(start + size * number, limit)
            for start, limit in zip(self._starts, self._limits_cpu, strict=True)
        ]

    def _choices(
        self, span: _Span, state: ChainState, logits: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """int64 [n, width] choices of the rows, ``NO_TOKEN`` where logits held a NaN, and [n, K]
        surprisals of the real ones."""
        is_bad = nan_rows(logits)
        # Rows of masks, too: what they propose follows all candidates.
        reqs, known = self._reqs[span.place], self._num_known[span.place]
        adjust(logits, adjusted_rows(reqs, self._width, num_known=known))
        size = self._kind.size
        real = logits.unflatten(0, (-1, self._width))[:, :size].flatten(0, 1)
        real = real if span.sampled.is_argmax else real.clone()  # a sampler overwrites them
        tokens = mark_faults(self._choose(span, logits, state), is_bad).view(-1, self._width)
        surprisals = surprisals_of(real, tokens[:, :size].flatten()).view(-1, size)
        return broadcast(torch.cat((tokens, surprisals), 1)).split((self._width, size), 1)

    def _choose(self, span: _Span, logits: torch.Tensor, state: ChainState) -> torch.Tensor:
        """int64 [n * width] tokens. Real rows are sampled as one token per forward would be. Mask
        rows may propose anything: their most likely token, or with a seed, whose noise depends on
        the position, the token sampled there."""
        if span.sampled.is_argmax:
            return logits.argmax(dim=-1)
        positions = self._block_rows.positions(state)
        if self._has_seeds:
            return span.sampled.sample(logits, positions.flatten())[0]
        size = self._kind.size
        tokens = logits.argmax(dim=-1).view(-1, self._width)
        real = logits.view(len(tokens), self._width, -1)[:, :size].flatten(0, 1)
        sampled, _ = span.sampled.sample(real, positions[:, :size].flatten())
        is_real = self._columns[:size] <= state.num_candidates[:, None]
        tokens[:, :size] = torch.where(is_real, sampled.view(-1, size), tokens[:, :size])
        return tokens.flatten()

    # -- forwards without a graph ------------------------------------------------

    def forward(
        self, longest: Sequence[int], state: ChainState, span: _Span
    ) -> LogitsProcessorOutput:
        """The logits of all rows, and hidden states for a head; ``longest`` is where blocks start
        at most."""
        pools, rows = self._pools[span.place], self._block_rows
        layout = VerifyLayout.of([self._wide.at(start) for start in longest])
        batch = block_batch(
            self._model.draft_runner,
            pools=pools,
            ids=rows.ids(state),
            positions=rows.positions(state),
            slots=rows.slots(state, self._model.req_to_token, pools),
            starts=state.starts,
            layout=layout,
            mask=flat_mask_at(layout, state.starts, self._tail) if self._has_mask else None,
            capture=self._model.head is not None,
        )
        return self._model.run(batch)

    @cached_property
    def _tail(self) -> torch.Tensor:
        return qlen_only_mask(self._wide, self._columns.device)


def both_ways(chunk: DraftChunk, graphs: BlockGraphs) -> tuple[Run, Run]:
    """One block of a chunk's requests, as a graph and in pieces: functions that return the rows'
    logits, and with a head what it reads, and in how many requests it proposes the same first
    token in the graph as in pieces, twice that part, 1 at most."""
    blocks = _Blocks(chunk.model, chunk.kind, chunk.batch, chunk.indices)
    state, (span,), head = blocks.known_state(), blocks.spans, chunk.model.head

    def replayed() -> Rows:
        after, _ = blocks.run(state, 0)
        logits, hidden = graphs.output_of(span.place)
        if head is None or hidden is None:
            return (logits,)
        *_, proposed = blocks.block(span, state, 0)
        same = (proposed[:, :1] == after.candidates[:, :1]).float().mean(0, keepdim=True)
        return logits, hidden, (2 * same).clamp(max=1)

    def in_pieces() -> Rows:
        output = blocks.forward(blocks.longest(0), state, span)
        if head is None:
            return (output.next_token_logits,)
        same = torch.ones(1, 1, device=output.next_token_logits.device)
        return output.next_token_logits, output.hidden_states, same

    return replayed, in_pieces
