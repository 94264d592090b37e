"""Causal passes of few rows as SGLang's own CUDA graphs of decode steps: each row is the step of a
request of its own, behind the rows before it.

Every layer writes the KV of all rows before any of them attends, so that a row sees those before it
as a later step would. Attention, adapters and positions are those of decode steps, whatever the
model: this serves targets that ``PassGraphs`` does not, such as those with latent attention. A row
reads its whole context again, which bounds the rows.

At start they run both ways (``graph_check``), and stay if they are right and faster than pieces.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_parse.attention.support import Attention
from sglang_parse.core.layout import VerifyLayout
from sglang_parse.engine import pass_graphs
from sglang_parse.startup.families import attention_of

MAX_READ_BYTES = 16 * 2**30
"""Of KV that a pass reads more than one in pieces does: about 4 ms of an H200, a sixth of what the
host takes for the pieces of 60 layers."""
MIN_ROWS = 8
"""Of the smallest graph that is checked at start."""
UNSERVED = (Attention.STATES, Attention.CHUNKS, Attention.SPARSE)
"""A state takes one row of a request after the other."""
logger = logging.getLogger(__name__)


class StepGraphs:
    """SGLang's graphs of a target's decode steps.

    Args:
        runner: the target's runner; its decode graphs exist.

    Attributes:
        name: for the log and metrics.
        rows: of the graphs that are checked, ascending.
        max_rows: of a pass.
    """

    def __init__(self, runner: Any) -> None:
        self.name = f"{pass_graphs.model_name(runner)}: decode steps"
        self._runner, sizes = runner, sorted(runner.decode_cuda_graph_capture_bs)
        self._sizes, self.max_rows = sizes, sizes[-1]
        self.rows = [size for size in _doubling(sizes) if size >= MIN_ROWS] or sizes[-1:]
        pool = runner.token_to_kv_pool
        size = pool.get_kv_size_bytes()  # keys' and values', or both together
        self._token_bytes = (sum(size) if isinstance(size, tuple) else size) / pool.size

    def fits(self, layout: VerifyLayout) -> bool:
        """Whether a pass runs as steps."""
        if layout.num_rows > self.max_rows or not layout.is_causal:
            return False
        tokens = sum((part.num_rows - 1) * part.prefix_len for part in layout.requests)
        return tokens * self._token_bytes <= MAX_READ_BYTES

    def run(self, batch: ForwardBatch, index: torch.Tensor) -> tuple[LogitsProcessorOutput, int]:
        """Runs a batch of such steps; returns the logits of the rows ``index`` (int64 [n]) with the
        captured hidden states of all, and the rows of the graph."""
        done = self._runner.forward(batch)
        output = done.logits_output
        output.next_token_logits = output.next_token_logits[index]
        graph = next(size for size in self._sizes if size >= batch.batch_size)
        return output, graph if done.can_run_graph else 0


def capture(runner: Any) -> list[StepGraphs]:
    """The graphs of a target whose passes have no ``PassGraphs``; none where it has no graphs of
    steps either, or takes a request's rows one after the other."""
    sizes, attention = runner.decode_cuda_graph_capture_bs, attention_of(runner.model_config)
    if pass_graphs.is_off() or not sizes or attention in UNSERVED:
        return []
    found = StepGraphs(runner)
    logger.info("PARSE: CUDA graphs of the %s run passes of %d rows", found.name, found.max_rows)
    return [found]


def _doubling(sizes: list[int]) -> list[int]:
    """The largest, and those that are at most half of the next one."""
    kept = sizes[-1:]
    for size in reversed(sizes):
        if 2 * size <= kept[0]:
            kept.insert(0, size)
    return kept
