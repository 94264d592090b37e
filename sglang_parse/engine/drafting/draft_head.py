"""The draft model's EAGLE-3 head: it proposes a block's candidates (``core.block``).

Its KV lies in the slots of the draft model's, see ``engine.eagle``: at a position it comes from the
draft model's hidden states there and the next token. Its forwards start where the device knows, as
blocks do, so the host does not wait for them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sglang_parse.attention.spec_input import ParseVerifyInput
from sglang_parse.attention.triton_wide import WideTritonBackend
from sglang_parse.core.layout import RequestLayout, VerifyLayout
from sglang_parse.engine.drafting.batches import block_batch
from sglang_parse.engine.eagle_head import EagleHead
from sglang_parse.engine.wide_graphs import WideInput


class DraftHead(EagleHead):
    """See ``EagleHead``; ``last_id``: the last token that it may propose, if there are more."""

    last_id: int | None = None

    def init_attention_backends(self) -> None:
        """Of its forwards here only: SGLang's other ones are for the steps of its worker."""
        with self.as_stock(), self.forward_contexts():
            self.worker.draft_worker.init_attention_backends()

    def init_cuda_graphs(self) -> None:
        """Captures nothing: its forwards are part of the blocks' graphs."""
        with self.as_stock(), self.forward_contexts():
            self.worker.draft_worker.init_cuda_graphs(capture_decode_cuda_graph=False)

    def extend(self, batch: ForwardBatch, following: torch.Tensor, hidden: torch.Tensor) -> None:
        """Writes its KV of tokens that the draft model has prefilled.

        Args:
            batch: as the draft model was given it.
            following: int64 [tokens] the token after each.
            hidden: [tokens, ...] the draft model's hidden states.
        """
        view = copy.copy(batch)
        view.input_ids, view.capture_hidden_mode = following, CaptureHiddenMode.NULL
        spans = zip(batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=True)
        view.spec_info = ParseVerifyInput(
            layout=VerifyLayout.of([RequestLayout(*span) for span in spans]),
            custom_mask=None,
            select_index=torch.zeros(1, dtype=torch.int64, device=following.device),
            hidden_states=hidden,
        )
        self._run(view)

    def forward(
        self,
        pools: torch.Tensor,
        longest: Sequence[int],
        ids: torch.Tensor,
        starts: torch.Tensor,
        hidden: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs one forward, see ``block_accept.HeadForward``.

        Args:
            pools: int64 [n] the requests' rows of ``req_to_token``.
            longest: upper bounds of ``starts``.
        """
        positions, slots = self.places(pools, starts, ids.shape[1])
        layout = VerifyLayout.of([RequestLayout(start, ids.shape[1]) for start in longest])
        batch = block_batch(
            self.runner,
            pools=pools,
            ids=ids,
            positions=positions,
            slots=slots,
            starts=starts,
            layout=layout,
            hidden=hidden,
            capture=True,
        )
        return self.chosen(self._run(batch), ids)

    def places(
        self, pools: torch.Tensor, starts: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [n, width] positions of rows from ``starts`` on, and their slots."""
        columns = starts[:, None] + torch.arange(width, device=starts.device)
        slots = self.worker.req_to_token_pool.req_to_token[pools[:, None], columns]
        return columns.clamp(max=self.runner.model_config.context_len - 1), slots.to(torch.int64)

    def chosen(
        self, output: LogitsProcessorOutput, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``forward``; the choices are the most likely tokens, in the draft model's
        vocabulary."""
        tokens, own = output.next_token_logits.argmax(dim=-1), self.worker.hot_token_id
        tokens = tokens if own is None else own[tokens]
        if self.last_id is not None:
            tokens = tokens.clamp(max=self.last_id)
        return tokens.view_as(ids), output.hidden_states.unflatten(0, ids.shape)

    def _run(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        with self.forward_contexts():
            self.runner.kv_index_translator.bind_own_plan(batch)
            return self.runner.forward(batch).logits_output


class HeadInGraph:
    """The head's forwards as parts of a block's CUDA graph.

    Args:
        size: tokens of the block.
        max_reqs: requests of the largest graph.
    """

    def __init__(self, head: DraftHead, size: int, max_reqs: int) -> None:
        self._head, self._backends = head, dict[int, WideTritonBackend]()
        for width in {size, 1}:
            with head.forward_contexts():
                backend = WideTritonBackend(head.runner, RequestLayout(0, width))
            backend.init_cuda_graph_state(max_reqs, max_reqs * width)
            self._backends[width] = backend

    def forward(
        self,
        batch: ForwardBatch,
        ids: torch.Tensor,
        starts: torch.Tensor,
        hidden: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``DraftHead.forward``; ``batch`` is the block's."""
        head, width, view = self._head, ids.shape[1], copy.copy(batch)
        positions, slots = head.places(batch.req_pool_indices, starts, width)
        view.input_ids, view.positions = ids.flatten(), positions.flatten()
        view.out_cache_loc = slots.flatten()
        view.seq_lens = view.orig_seq_lens = starts
        view.capture_hidden_mode = CaptureHiddenMode.FULL
        view.spec_info = WideInput(width, hidden.flatten(0, 1))
        head.runner.kv_index_translator.bind_runner_slots(view)
        backend = self._backends[width]
        backend.init_forward_metadata_out_graph(view, in_capture=True)
        backend.init_forward_metadata_in_graph(view)
        context = ForwardContext(attn_backend=backend)
        with head.forward_contexts(), forward_context(context, forward_batch=view):
            output = head.runner.model.forward(view.input_ids, view.positions, view)
        return head.chosen(output, ids)
