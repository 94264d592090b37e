"""A block of a draft model as one CUDA graph.

The whole block is in the graph: its inputs come from the requests' state on the device, and so do
its attention's lengths; the choice of every row, the acceptance and a head's forwards follow. So
the host launches block after block without knowing where they start.

The choices in the graph are the rows' most likely tokens. Requests that sample or whose logits are
adjusted take the logits of the same replay (``output_of``) and are accepted behind it. Ranks need
no broadcast: all hold the same bits of gathered logits.

Source: ``sglang.srt.speculative.dflash_worker_v2``, whose drafts are sampled in a capture.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_parse.core.block import NO_TOKEN, BlockKind, Masks
from sglang_parse.core.block_accept import (
    BlockRows,
    ChainState,
    HeadForward,
    accept_blocks,
    matched_candidates,
    propose,
)
from sglang_parse.engine.drafting.block_kernels import ARE_USED, accept_rows, load_rows
from sglang_parse.engine.drafting.draft_head import DraftHead, HeadInGraph
from sglang_parse.engine.logits.sampling import surprisals_of
from sglang_parse.engine.wide_graphs import (
    MAX_DRAFT_ROWS,
    WideGraphs,
    WideInputs,
    graph_sizes_of,
)

FEW_ROWS = 256
"""Up to so many rows one product with the LM head costs less than a second read of its weights."""
LOGITS_ROWS = 512
"""Rows whose logits exist at a time in a graph, whose memory stays: 0.5 GB at 152,000 tokens."""
_COUNTS, _STATE = 6, 4
"""Columns before the candidates: of a block's input, and of the state after it."""
LogitsOf = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states [n, width] -> logits [n, vocab]."""


class BlockBody(WideInputs):
    """What a block does around the model's forward, on tensors that stay where they are.

    Args:
        req_to_token: SGLang's table of slots.
        max_reqs: requests of the largest block.
        last_position: the last position of the model's context.
    """

    def __init__(
        self,
        kind: BlockKind,
        mask_id: int,
        req_to_token: torch.Tensor,
        *,
        max_reqs: int,
        last_position: int,
    ) -> None:
        rows, device = kind.rows(0), req_to_token.device
        super().__init__(rows.num_rows, max_reqs, device)
        self._kind, self._req_to_token = kind, req_to_token
        self._num_masks = kind.size - 1
        offsets = torch.tensor(rows.positions(), device=device)
        self._columns = torch.arange(self.width, device=device)
        self._rows = BlockRows(offsets, self._columns, mask_id, last_position)
        record_len = 2 + 2 * kind.size + self._num_masks
        with torch.device(device):
            self._input = torch.zeros(max_reqs, _COUNTS + self._num_masks, dtype=torch.int64)
            done_len = _STATE + self._num_masks + record_len
            self._output = torch.zeros(max_reqs, done_len, dtype=torch.int64)

    # -- before and behind a replay ---------------------------------------------

    def put(self, state: ChainState, pools: torch.Tensor, limits: torch.Tensor, size: int) -> None:
        """Writes what the next block starts from; ``size`` requests, the rest of them padding."""
        counts = (pools, limits, state.starts, state.last, state.num_candidates, state.num_known)
        self._input[: len(pools)] = torch.cat((torch.stack(counts, 1), state.candidates), 1)
        self._input[len(pools) : size] = 0  # SGLang's padding row, whose slots are never read

    def take(self, num_reqs: int) -> tuple[ChainState, torch.Tensor]:
        """Returns what the block has accepted, as ``accept_blocks``."""
        done = self._output[:num_reqs].clone()  # the next replay writes there
        after, record = done.split((_STATE + self._num_masks, 3 * self._kind.size + 1), 1)
        starts, last, num_candidates, num_known = after[:, :_STATE].unbind(1)
        return ChainState(starts, last, after[:, _STATE:], num_candidates, num_known), record

    # -- in the graph -----------------------------------------------------------

    def load(self, size: int) -> None:
        if ARE_USED:
            load_rows(self._kind, self._input, size, self, self._rows, self._req_to_token)
            return
        (state, pools), num_rows = self._state(size), size * self.width
        self.ids[:num_rows] = self._rows.ids(state).flatten()
        self.positions[:num_rows] = self._rows.positions(state).flatten()
        self.slots[:num_rows] = self._rows.slots(state, self._req_to_token, pools).flatten()
        self.pools[:size], self.starts[:size] = pools, state.starts

    def accept(
        self,
        hidden: torch.Tensor,
        logits_of: LogitsOf,
        head: tuple[HeadForward, torch.Tensor] | None = None,
    ) -> None:
        """Chooses and accepts.

        Args:
            hidden: [size * width, ...] the rows' hidden states.
            head: what proposes, if masks do not, and [size * width, ...] what it reads.
        """
        size = len(hidden) // self.width
        state, _ = self._state(size)
        if self._kind.masks is Masks.EVERY and len(hidden) > FEW_ROWS:
            choices, surprisals = self._sparse_choices(state, hidden, logits_of)
        else:
            choices, surprisals = _greedy(hidden, logits_of, self.width, self._kind.size)
        proposed = head and propose(head[0], state, choices, head[1].unflatten(0, choices.shape))
        masks, mask_id = self._kind.masks, self._rows.mask_id
        if ARE_USED:
            accept_rows(
                self._kind, self._input, self._output, choices, surprisals, proposed, mask_id
            )
            return
        after, record = accept_blocks(masks, state, choices, surprisals, mask_id, proposed)
        counts = (after.starts, after.last, after.num_candidates, after.num_known)
        self._output[:size] = torch.cat((torch.stack(counts, 1), after.candidates, record), 1)

    def _state(self, size: int) -> tuple[ChainState, torch.Tensor]:
        pools, limits, starts, last, num_candidates, num_known = self._input[:size, :_COUNTS].T
        candidates = self._input[:size, _COUNTS:]
        # No block goes past its slots into those of others.
        starts = torch.minimum(starts, limits)
        return ChainState(starts, last, candidates, num_candidates, num_known), pools

    def _sparse_choices(
        self, state: ChainState, hidden: torch.Tensor, logits_of: LogitsOf
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``_greedy``: of the masks only those after the last accepted candidate choose."""
        size, num_reqs = self._kind.size, len(state.starts)
        rows = hidden.view(num_reqs, self.width, -1)
        choices = torch.zeros(num_reqs, self.width, dtype=torch.int64, device=hidden.device)
        choices[:, :size], surprisals = _greedy(rows[:, :size].flatten(0, 1), logits_of, size, size)
        first = size + matched_candidates(state, choices) * self._num_masks
        masks = first[:, None] + self._columns[: self._num_masks]
        picked = rows.gather(1, masks[:, :, None].expand(-1, -1, rows.shape[2]))
        proposed, _ = _greedy(picked.flatten(0, 1), logits_of, self._num_masks, 0)
        return choices.scatter(1, masks, proposed), surprisals


class BlockGraphs(WideGraphs):
    """The graphs of one kind, for several numbers of requests.

    Args:
        runner: the draft model's runner; its decode graphs exist.
        head: proposes, in kinds without masks.
    """

    def __init__(
        self, runner: Any, kind: BlockKind, mask_id: int, head: DraftHead | None = None
    ) -> None:
        rows = kind.rows(0)
        sizes = graph_sizes_of(rows.num_rows, MAX_DRAFT_ROWS, runner.decode_cuda_graph_capture_bs)
        self.body = BlockBody(
            kind,
            mask_id,
            runner.req_to_token_pool.req_to_token,
            max_reqs=sizes[-1],
            last_position=runner.model_config.context_len - 1,
        )
        self._head = HeadInGraph(head, kind.size, sizes[-1]) if head else None
        super().__init__(runner, rows, self.body, sizes, f"blocks, {kind}")

    # -- replay -----------------------------------------------------------------

    def run(
        self, state: ChainState, pools: torch.Tensor, limits: torch.Tensor
    ) -> tuple[ChainState, torch.Tensor]:
        """Replays one block of each request; returns as ``accept_blocks``.

        Args:
            pools: int64 [n] rows of ``req_to_token``.
            limits: int64 [n] the highest position a block may start at.
        """
        size = self.padded(len(pools))
        self.body.put(state, pools, limits, size)
        self.replay(size)
        return self.body.take(len(pools))

    def output_of(self, requests: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of the last replay, for some of its requests: float [n * width, vocab] logits, and the
        hidden states that a head reads."""
        width = self.body.width
        rows = slice(requests.start * width, requests.stop * width)
        hidden, *others = (part[rows] for part in self.states)
        return self._logits(hidden), torch.cat(others, -1) if others else None

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden).next_token_logits

    # -- capture ----------------------------------------------------------------

    def load(self, _: Any, forward_batch: ForwardBatch) -> None:
        self.body.load(forward_batch.batch_size)
        self._batch = forward_batch

    def end(self, hidden: torch.Tensor) -> None:
        head = None
        if self._head is not None:
            others = [part[: len(hidden)] for part in self.states[1:]]
            head = partial(self._head.forward, self._batch), torch.cat(others, -1)
        self.body.accept(hidden, self._logits, head)


def _greedy(
    hidden: torch.Tensor, logits_of: LogitsOf, width: int, num_real: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [n, width] the rows' most likely tokens, ``NO_TOKEN`` where a row's logits hold a NaN,
    and [n, num_real] the surprisals of the first ones."""
    parts = hidden.split(max(1, LOGITS_ROWS // width) * width)
    found = [_most_likely(logits_of(part), width, num_real) for part in parts]
    tokens, surprisals = map(torch.cat, zip(*found, strict=True))
    return tokens, surprisals


def _most_likely(
    logits: torch.Tensor, width: int, num_real: int
) -> tuple[torch.Tensor, torch.Tensor]:
    # The most likely token of a row with a NaN is a NaN: one look at the chosen logits.
    tokens = logits.argmax(dim=-1)
    chosen = logits.gather(1, tokens[:, None])[:, 0]
    tokens = torch.where(chosen.isnan(), NO_TOKEN, tokens).view(-1, width)
    real = logits.unflatten(0, tokens.shape)[:, :num_real].flatten(0, 1)
    surprisals = surprisals_of(real, tokens[:, :num_real].flatten())
    return tokens, surprisals.view(len(tokens), num_real)
