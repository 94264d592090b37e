"""Causal forwards of few rows per request as one CUDA graph, instead of one piece per layer: verify
passes of the target, and prefills of the draft model.

All requests of a replay have the same rows: one with fewer gets padding rows behind them, which
write to SGLang's padding slot and which no other row attends to. The logits of the rows that need
them follow the replay as they follow a forward in pieces.

On with Triton, where it was seen on a GPU; ``ENV_VAR``, 0 or 1, decides otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sglang_parse.attention.support import Attention
from sglang_parse.core.layout import RequestLayout
from sglang_parse.device import on_device
from sglang_parse.engine.wide_graphs import WideGraphs, WideInputs, graph_sizes_of
from sglang_parse.startup.families import attention_of

ENV_VAR = "SGLANG_PARSE_PASS_GRAPHS"
WIDTHS = (9, 17, 33, 65, 129)
"""Of passes: drafts of up to 8, 16, 32, 64 and 128 tokens."""
MAX_ROWS = 512
"""Rows of a pass's largest graph: so many cost a 14B target about two decode steps on an H100, a
pass in pieces more than three."""
PREFILL_WIDTHS = (32, 128, 512, 2048)
"""Of prefills: one of 128 rows took 12 ms in pieces on an H200, 1.6 of it on the device."""
MAX_CONTEXT = 16_384
"""Tokens before a request's rows, where its context is not split: SGLang's kernel reads a longer
one more slowly, in one part, than the host launches pieces (computed)."""


class PassGraphs(WideGraphs):
    """The graphs of one width, for several numbers of requests.

    Args:
        runner: the model's runner; its decode graphs exist.
        width: most rows of a request.
        max_rows: rows of the largest graph.
    """

    def __init__(self, runner: Any, width: int, max_rows: int) -> None:
        sizes = graph_sizes_of(width, max_rows, runner.decode_cuda_graph_capture_bs)
        rows = RequestLayout(prefix_len=0, num_draft_rows=width)
        super().__init__(runner, rows, WideInputs(width, sizes[-1], runner.device))

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether a graph runs this causal forward."""
        prefix_lens, lens = batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
        is_near = self.attn_backend.splits or max(prefix_lens) <= MAX_CONTEXT
        return is_near and max(lens) <= self.inputs.width and len(lens) <= self.max_bs

    def run(self, batch: ForwardBatch) -> tuple[LogitsProcessorOutput, int]:
        """Runs a forward.

        Args:
            batch: the forward as SGLang's runner takes it.

        Returns:
            As that runner; and the rows of the graph.
        """
        size = self.padded(batch.batch_size)
        index = self._put(batch, size)
        self.replay(size)
        hidden, *aux = (rows[index] for rows in self.states)
        context = ForwardContext(attn_backend=self.model_runner.attn_backend)
        with torch.no_grad(), forward_context(context, forward_batch=batch):
            output = self.head(hidden, batch, *([aux] if aux else []))
        return output, size * self.inputs.width

    def _put(self, batch: ForwardBatch, size: int) -> torch.Tensor:
        """Writes the inputs of ``size`` requests; int64 [rows of the batch] where its rows are."""
        inputs, lens = self.inputs, batch.extend_seq_lens_cpu
        places = [i * inputs.width + row for i, count in enumerate(lens) for row in range(count)]
        index, num_rows = on_device(places, inputs.ids.device), size * inputs.width
        live = (batch.input_ids, batch.positions, batch.out_cache_loc)
        for static, part in zip((inputs.ids, inputs.positions, inputs.slots), live, strict=True):
            static[:num_rows] = 0  # SGLang's padding slot, whose KV is never read
            static[index] = part.to(torch.int64)
        inputs.pools[:size], inputs.starts[:size] = 0, 0
        inputs.pools[: len(lens)] = batch.req_pool_indices
        inputs.starts[: len(lens)] = batch.extend_prefix_lens
        return index


def capture(runner: Any, widths: Sequence[int], max_rows: int = MAX_ROWS) -> list[PassGraphs]:
    """Captures a model's forwards, narrowest first; none unless they are asked for, nor where its
    decode steps have no graphs, where forwards need more than ``WideInputs``, or with other than
    full attention."""
    seen = str(int(runner.prefill_attention_backend_str == "triton"))
    is_asked, config = os.environ.get(ENV_VAR, seen) == "1", runner.model_config
    is_plain = is_asked and attention_of(config) is Attention.FULL and not config.model_is_mrope
    if not is_plain or runner.lora_manager or not runner.decode_cuda_graph_capture_bs:
        return []
    return [PassGraphs(runner, width, max_rows) for width in sorted({*widths})]
