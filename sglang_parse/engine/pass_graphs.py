"""Causal verify passes of few rows per request as one CUDA graph, instead of one piece per layer.

All requests of a replay have the same rows: who has fewer gets padding rows behind them, which
write to SGLang's padding slot and which nobody attends to. The logits of the rows that need them
follow the replay as they follow a pass in pieces.

On with Triton, where it was seen on a GPU; ``ENV_VAR``, 0 or 1, decides otherwise.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sglang_parse.attention.support import Attention
from sglang_parse.core.layout import RequestLayout, VerifyLayout
from sglang_parse.device import on_device
from sglang_parse.engine.wide_graphs import WideGraphs, WideInputs, graph_sizes_of
from sglang_parse.startup.families import attention_of

ENV_VAR = "SGLANG_PARSE_PASS_GRAPHS"
WIDTHS = (9, 17, 33)
"""Drafts of up to 8, 16 and 32 tokens."""
MAX_ROWS = 512
"""Rows of the largest graph: so many cost a 14B target about two decode steps on an H100, a pass in
pieces more than three."""
MAX_CONTEXT = 16_384
"""Tokens before a request's rows: Triton's kernel reads a longer context more slowly, in one part,
than the host launches pieces (computed)."""


class PassGraphs(WideGraphs):
    """The graphs of one width, for several numbers of requests.

    Args:
        runner: the target's runner; its decode graphs exist.
        width: most rows of a request.
    """

    def __init__(self, runner: Any, width: int) -> None:
        sizes = graph_sizes_of(width, MAX_ROWS, runner.decode_cuda_graph_capture_bs)
        rows = RequestLayout(prefix_len=0, num_draft_rows=width)
        super().__init__(runner, rows, WideInputs(width, sizes[-1], runner.device))

    def fits(self, layout: VerifyLayout) -> bool:
        """Whether a graph runs this pass."""
        width, parts = self.inputs.width, layout.requests
        is_short = all(p.num_rows <= width and p.prefix_len <= MAX_CONTEXT for p in parts)
        return layout.is_causal and is_short and len(parts) <= self.max_bs

    def run(self, batch: ForwardBatch, layout: VerifyLayout) -> tuple[LogitsProcessorOutput, int]:
        """Runs a pass.

        Args:
            batch: the pass as SGLang's runner takes it.

        Returns:
            As that runner; and the rows of the graph.
        """
        size = self.padded(len(layout.requests))
        index = self._put(batch, layout, size)
        self.replay(size)
        hidden, *aux = (rows[index] for rows in self.states)
        context = ForwardContext(attn_backend=self.model_runner.attn_backend)
        with torch.no_grad(), forward_context(context, forward_batch=batch):
            output = self.head(hidden, batch, *([aux] if aux else []))
        return output, size * self.inputs.width

    def _put(self, batch: ForwardBatch, layout: VerifyLayout, size: int) -> torch.Tensor:
        """Writes the inputs of ``size`` requests; int64 [rows of the pass] where its rows are."""
        inputs, parts = self.inputs, list(enumerate(layout.requests))
        places = [i * inputs.width + row for i, part in parts for row in range(part.num_rows)]
        index, num_rows = on_device(places, inputs.ids.device), size * inputs.width
        live = (batch.input_ids, batch.positions, batch.out_cache_loc)
        for static, part in zip((inputs.ids, inputs.positions, inputs.slots), live, strict=True):
            static[:num_rows] = 0  # SGLang's padding slot, whose KV nobody reads
            static[index] = part.to(torch.int64)
        inputs.pools[:size], inputs.starts[:size] = 0, 0
        inputs.pools[: len(parts)] = batch.req_pool_indices
        inputs.starts[: len(parts)] = batch.extend_prefix_lens
        return index


def capture(runner: Any, head_width: int = 0) -> list[PassGraphs]:
    """Captures a target's passes, narrowest first; none unless they are asked for, nor where its
    decode steps have no graphs, where forwards need more than ``WideInputs``, or with other than
    full attention.

    Args:
        head_width: rows of a request that verifies an EAGLE-3 head's proposal.
    """
    seen = str(int(runner.prefill_attention_backend_str == "triton"))
    is_asked, config = os.environ.get(ENV_VAR, seen) == "1", runner.model_config
    is_plain = is_asked and attention_of(config) is Attention.FULL and not config.model_is_mrope
    if not is_plain or runner.lora_manager or not runner.decode_cuda_graph_capture_bs:
        return []
    return [PassGraphs(runner, width) for width in sorted({*WIDTHS, head_width} - {0})]
