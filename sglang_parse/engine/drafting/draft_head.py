"""The draft model's EAGLE-3 head: it proposes a block's candidates (``core.block``).

Its KV lies in the slots of the draft model's, see ``engine.eagle``: at a position it comes from the
draft model's hidden states there and the next token. Its forwards start where the device knows, as
blocks do, so the host does not wait for them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch

from sglang_parse.attention.spec_input import ParseVerifyInput
from sglang_parse.core.layout import RequestLayout, VerifyLayout
from sglang_parse.engine.drafting.batches import block_batch
from sglang_parse.engine.eagle_head import EagleHead


class DraftHead(EagleHead):
    """See ``EagleHead``."""

    @property
    def runner(self) -> Any:
        return self.worker.draft_runner

    def init_attention_backends(self) -> None:
        """Of its forwards here only: SGLang's other ones are for the steps of its worker."""
        with self.as_eagle3(), self.forward_contexts():
            self.worker.draft_worker.init_attention_backends()

    def init_cuda_graphs(self) -> None:
        """Captures nothing: its forwards are part of the blocks' graphs."""
        with self.as_eagle3(), self.forward_contexts():
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
        num_reqs, width = ids.shape
        columns = starts[:, None] + torch.arange(width, device=ids.device)
        table, last_position = self.worker.req_to_token_pool.req_to_token, self._last_position
        batch = block_batch(
            self.runner,
            pools=pools,
            ids=ids,
            positions=columns.clamp(max=last_position),
            slots=table[pools[:, None], columns].to(torch.int64),
            starts=starts,
            layout=VerifyLayout.of([RequestLayout(start, width) for start in longest]),
            hidden=hidden,
            capture=True,
        )
        output = self._run(batch)
        return self.tokens(output).view(num_reqs, width), output.hidden_states.view(
            num_reqs, width, -1
        )

    def tokens(self, output: LogitsProcessorOutput) -> torch.Tensor:
        """int64 [rows] its most likely tokens, in the draft model's vocabulary."""
        tokens, own = output.next_token_logits.argmax(dim=-1), self.worker.hot_token_id
        return tokens if own is None else own[tokens]

    @property
    def _last_position(self) -> int:
        return int(self.runner.model_config.context_len) - 1

    def _run(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        with self.forward_contexts():
            self.runner.kv_index_translator.bind_own_plan(batch)
            return self.runner.forward(batch).logits_output
