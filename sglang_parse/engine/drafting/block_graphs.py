"""A block of a parallel draft as one CUDA graph.

SGLang captures passes of fixed width for its verify passes. The same runner captures a draft's
blocks here, with an attention backend of their own. The whole block is in the graph: its inputs
come from the requests' state on the device, and so do its attention's lengths; the choice of every
row and the acceptance follow. So the host launches block after block without knowing where they
start.

The choices in the graph are the rows' most likely tokens. Requests that sample or whose logits are
adjusted take the logits of the same replay (``logits_of``) and are accepted behind it. Ranks need
no broadcast: all hold the same bits of gathered logits.

Source: ``sglang.srt.speculative.uno_cuda_graph_runner``, a second runner with a width of its own;
``DFlashWorkerV2``, whose drafts are sampled in a capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_exec, get_spec
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

from sglang_parse.attention.triton_blocks import BlockTritonBackend
from sglang_parse.core.block import NO_TOKEN, DraftLayout, Masks
from sglang_parse.core.block_accept import (
    BlockRows,
    ChainState,
    accept_blocks,
    matched_candidates,
)

MAX_ROWS = 2048
"""Rows of the largest graph: above, a draft model of 0.6B is bound by its operations."""
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Requests of the graphs, at most."""
FEW_ROWS = 256
"""Up to so many rows one product with the LM head costs less than a second read of its weights."""
LOGITS_ROWS = 512
"""Rows whose logits exist at a time in a graph, whose memory stays: 0.5 GB at 152,000 tokens."""
_COUNTS, _STATE = 6, 4
"""Columns before the candidates: of a block's input, and of the state after it."""
LogitsOf = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states [n, width] -> logits [n, vocab]."""


class _BlockInput(SpecInput):
    """What attention and the logits processor read of a block: a verify pass of ``width`` rows per
    request; the mask is the attention backend's own."""

    capture_hidden_mode = CaptureHiddenMode.NULL

    def __init__(self, width: int) -> None:
        super().__init__(SpecInputType.EAGLE_VERIFY)
        self.num_tokens_per_req = self.num_tokens_for_logprob_per_req = width
        self.draft_token_num = width

    def get_spec_adjust_token_coefficient(self) -> tuple[int, int]:
        return self.num_tokens_per_req, self.num_tokens_for_logprob_per_req


class BlockBody:
    """What a block does around the model's forward, on tensors that stay where they are.

    Args:
        req_to_token: SGLang's table of slots.
        max_reqs: requests of the largest block.
        last_position: the last position of the model's context.
        hidden: an empty tensor of the model's hidden states [0, width].
    """

    def __init__(
        self,
        layout: DraftLayout,
        mask_id: int,
        req_to_token: torch.Tensor,
        *,
        max_reqs: int,
        last_position: int,
        hidden: torch.Tensor,
    ) -> None:
        self._layout, self._req_to_token, rows = layout, req_to_token, layout.rows(0)
        self.width, self._num_masks = rows.num_rows, layout.size - 1
        max_rows, device = max_reqs * self.width, req_to_token.device
        offsets = torch.tensor(rows.positions(), device=device)
        self._columns = torch.arange(self.width, device=device)
        self._rows = BlockRows(offsets, self._columns, mask_id, last_position)
        record_len = 2 + layout.size + self._num_masks
        with torch.device(device):
            self._input = torch.zeros(max_reqs, _COUNTS + self._num_masks, dtype=torch.int64)
            done_len = _STATE + self._num_masks + record_len
            self._output = torch.zeros(max_reqs, done_len, dtype=torch.int64)
            self.ids, self.positions, self.slots = torch.zeros(3, max_rows, dtype=torch.int64)
            self.pools, self.starts = torch.zeros(2, max_reqs, dtype=torch.int64)
        self.hidden = hidden.new_zeros(max_rows, hidden.shape[1])

    # -- before and behind a replay ---------------------------------------------

    def put(self, state: ChainState, pools: torch.Tensor, limits: torch.Tensor, size: int) -> None:
        """Writes what the next block starts from; ``size`` requests, the rest of them padding."""
        counts = (pools, limits, state.starts, state.last, state.num_candidates, state.num_known)
        self._input[: len(pools)] = torch.cat((torch.stack(counts, 1), state.candidates), 1)
        self._input[len(pools) : size] = 0  # SGLang's padding row, whose slots nobody reads

    def take(self, num_reqs: int) -> tuple[ChainState, torch.Tensor]:
        """Returns what the block has accepted, as ``accept_blocks``."""
        done = self._output[:num_reqs].clone()  # the next replay writes there
        after, record = done.split((_STATE + self._num_masks, 2 * self._layout.size + 1), 1)
        starts, last, num_candidates, num_known = after[:, :_STATE].unbind(1)
        return ChainState(starts, last, after[:, _STATE:], num_candidates, num_known), record

    # -- in the graph -----------------------------------------------------------

    def load(self, size: int) -> None:
        (state, pools), num_rows = self._state(size), size * self.width
        self.ids[:num_rows] = self._rows.ids(state).flatten()
        self.positions[:num_rows] = self._rows.positions(state).flatten()
        self.slots[:num_rows] = self._rows.slots(state, self._req_to_token, pools).flatten()
        self.pools[:size], self.starts[:size] = pools, state.starts

    def accept(self, hidden: torch.Tensor, logits_of: LogitsOf) -> None:
        """Chooses and accepts.

        Args:
            hidden: [size * width, ...] the rows' hidden states.
        """
        self.hidden[: len(hidden)] = hidden
        size = len(hidden) // self.width
        state, _ = self._state(size)
        if self._layout.masks is Masks.EVERY and len(hidden) > FEW_ROWS:
            choices = self._sparse_choices(state, hidden, logits_of)
        else:
            choices = _greedy(hidden, logits_of).view(size, self.width)
        after, record = accept_blocks(self._layout.masks, state, choices, self._rows.mask_id)
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
    ) -> torch.Tensor:
        """int64 [n, width]: of the masks only those after the last accepted candidate choose."""
        size, num_reqs = self._layout.size, len(state.starts)
        rows = hidden.view(num_reqs, self.width, -1)
        choices = torch.zeros(num_reqs, self.width, dtype=torch.int64, device=hidden.device)
        choices[:, :size] = _greedy(rows[:, :size].flatten(0, 1), logits_of).view(num_reqs, size)
        first = size + matched_candidates(state, choices) * self._num_masks
        masks = first[:, None] + self._columns[: self._num_masks]
        picked = rows.gather(1, masks[:, :, None].expand(-1, -1, rows.shape[2]))
        proposed = _greedy(picked.flatten(0, 1), logits_of).view(num_reqs, self._num_masks)
        return choices.scatter(1, masks, proposed)


class BlockGraphs(DecodeCudaGraphRunner):
    """The graphs of one layout, for several numbers of requests.

    Args:
        runner: the draft model's runner; its decode graphs exist.
    """

    def __init__(self, runner: Any, layout: DraftLayout, mask_id: int) -> None:
        width = layout.rows(0).num_rows
        sizes = block_sizes(width, runner.decode_cuda_graph_capture_bs)
        config = runner.model_config
        self._head: LogitsOf | None = None
        self.body = BlockBody(
            *(layout, mask_id, runner.req_to_token_pool.req_to_token),
            max_reqs=sizes[-1],
            last_position=config.context_len - 1,
            hidden=torch.empty(0, config.hidden_size, dtype=runner.dtype, device=runner.device),
        )
        with _capturing(runner, self, sizes):
            super().__init__(
                runner,
                attn_backend=BlockTritonBackend(runner, layout),
                speculative_num_steps=1,
                speculative_num_draft_tokens=width,
            )

    # -- replay -----------------------------------------------------------------

    def fits(self, num_reqs: int) -> bool:
        return num_reqs <= self.max_bs

    def run(
        self, state: ChainState, pools: torch.Tensor, limits: torch.Tensor
    ) -> tuple[ChainState, torch.Tensor]:
        """Replays one block of each request; returns as ``accept_blocks``.

        Args:
            pools: int64 [n] rows of ``req_to_token``.
            limits: int64 [n] the highest position a block may start at.
        """
        size = self._pad_to_bucket(len(pools), self.capture_bs)
        self.body.put(state, pools, limits, size)
        with torch.no_grad(), self.model_context(), self.backend.replay_session():
            self.backend.replay(self._make_graph_key(size), None)
            self._publish_read_done(in_graph=False)
        return self.body.take(len(pools))

    def logits_of(self, requests: slice) -> torch.Tensor:
        """float [n * width, vocab] logits of the last replay, for some of its requests."""
        assert self._head is not None
        width = self.body.width
        return self._head(self.body.hidden[requests.start * width : requests.stop * width])

    # -- capture ----------------------------------------------------------------

    def get_spec_info(self, num_tokens: int) -> SpecInput:
        del num_tokens
        return _BlockInput(self.body.width)

    def _next_token_logits_buffer_capacity_rows(self, max_num_tokens: int) -> int:
        # The buffer that SGLang's runners share holds one row per request; the choices are made in
        # the graph, and no logits leave it.
        return max_num_tokens // self.body.width

    def capture_prepare(self, size: int, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """The batch reads tensors that only these graphs write: SGLang's runners share theirs."""
        forward_batch, backend, proxy = super().capture_prepare(size, *args, **kwargs)
        body, rows = self.body, slice(size * self.body.width)
        forward_batch.input_ids = body.ids[rows]
        forward_batch.positions = body.positions[rows]
        forward_batch.out_cache_loc = body.slots[rows]
        forward_batch.req_pool_indices = body.pools[:size]
        forward_batch.seq_lens = forward_batch.orig_seq_lens = body.starts[:size]
        forward_batch.next_token_logits_buffer = None
        self.model_runner.kv_index_translator.bind_runner_slots(forward_batch)
        return forward_batch, backend, proxy

    def load(self, _: Any, forward_batch: ForwardBatch) -> None:
        """Begins a graph, as one of SGLang's capture hooks."""
        self.body.load(forward_batch.batch_size)

    def end(self, hidden: torch.Tensor, head: LogitsOf) -> None:
        """Ends a graph."""
        self._head = head
        self.body.accept(hidden, head)


class _AcceptingHead(torch.nn.Module):
    """Stands in for the model's logits processor while its blocks are captured."""

    def __init__(self, graphs: BlockGraphs, processor: torch.nn.Module) -> None:
        super().__init__()
        self._graphs, self._processor = (graphs,), (processor,)  # not submodules

    def forward(
        self, input_ids: Any, hidden: torch.Tensor, lm_head: Any, forward_batch: Any, *_: Any
    ) -> LogitsProcessorOutput:
        (graphs,), (processor,) = self._graphs, self._processor

        def head(hidden: torch.Tensor) -> torch.Tensor:
            return processor(input_ids, hidden, lm_head, forward_batch).next_token_logits

        graphs.end(hidden, head)
        return LogitsProcessorOutput(next_token_logits=None)


def block_sizes(width: int, captured: Sequence[int]) -> list[int]:
    """Numbers of requests whose blocks of ``width`` rows are captured."""
    return [n for n in SIZES if n * width <= MAX_ROWS and n <= max(captured)]


def _greedy(hidden: torch.Tensor, logits_of: LogitsOf) -> torch.Tensor:
    """int64 [n] the rows' most likely tokens, ``NO_TOKEN`` where a row's logits hold a NaN."""
    return torch.cat([_most_likely(logits_of(part)) for part in hidden.split(LOGITS_ROWS)])


def _most_likely(logits: torch.Tensor) -> torch.Tensor:
    # The most likely token of a row with a NaN is a NaN: one look at the chosen logits.
    tokens = logits.argmax(dim=-1)
    chosen = logits.gather(1, tokens[:, None])[:, 0]
    return torch.where(chosen.isnan(), NO_TOKEN, tokens)


@contextmanager
def _capturing(runner: Any, graphs: BlockGraphs, sizes: Sequence[int]) -> Iterator[None]:
    """While it lasts, captures of the runner are those of ``graphs``."""
    decode, model = get_exec().graph.cuda_graph_config.decode, runner.model
    processor, bs = model.logits_processor, decode.bs
    width = {
        "speculative_num_draft_tokens": graphs.body.width,
        "speculative_num_steps": 1,
        "speculative_eagle_topk": 1,
    }
    decode.bs, model.logits_processor = [*sizes], _AcceptingHead(graphs, processor)
    runner.capture_head_hooks.append(graphs.load)
    try:
        with get_spec().override(**width):
            yield
    finally:
        runner.capture_head_hooks.remove(graphs.load)
        decode.bs, model.logits_processor = bs, processor
