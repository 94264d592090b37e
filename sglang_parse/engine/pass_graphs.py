"""Causal forwards as one CUDA graph, instead of one piece per layer: the target's verify passes and
the draft model's prefills.

A graph has so many rows, whoever's they are: the requests' lengths are on the device. Padding rows
are those of a request of their own, which write to SGLang's padding slot and which no other row
attends to. The logits of the rows that need them follow the replay as they follow a forward in
pieces.

Attention is the graphs' own, on the KV pool of the model's backend, whichever that is. At start
they run both ways (``graph_check``), and stay if they are right and faster; ``ENV_VAR`` is 1 to
keep all, 0 for none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_parallel

from sglang_parse.attention.support import Attention
from sglang_parse.core.layout import RequestLayout
from sglang_parse.engine.wide_graphs import WideGraphs, WideInputs, model_name
from sglang_parse.startup.families import attention_of

logger = logging.getLogger(__name__)

ENV_VAR = "SGLANG_PARSE_PASS_GRAPHS"
ROWS = {16: (1, 2, 3, 4, 6, 8), 128: (2, 3, 4, 5, 6, 8, 12, 16)}
"""Rows of the graphs: 16 to 128, and 256 to 2,048. SGLang's runner counts them in "requests" of so
many rows, because it captures no more of them than its pool has."""
MAX_ROWS, MAX_PREFILL_ROWS = 1024, 2048
"""Of the largest graph: above, a pass is bound by its operations, and so is a draft's prefill."""
MAX_REQS = 128
MAX_CONTEXT = 16_384
"""Tokens before a request's rows, where its context is not split: SGLang's kernel reads a longer
one more slowly, in one part, than the host launches pieces (computed)."""
SERVED = (Attention.FULL, Attention.WINDOWS)


class PassGraphs(WideGraphs):
    """The graphs of one unit, for several numbers of rows.

    Args:
        runner: the model's runner; its decode graphs exist.
        unit: rows; ``sizes``: how many units each graph has.
        others: graphs of the same model.
    """

    def __init__(
        self, runner: Any, unit: int, sizes: tuple[int, ...], others: Sequence[PassGraphs] = ()
    ) -> None:
        self.max_rows = unit * sizes[-1]
        self.max_reqs = min(MAX_REQS, runner.req_to_token_pool.size)
        inputs = WideInputs(unit, sizes[-1], runner.device, 1 + self.max_reqs)
        slots = others[0].attn_backend.cuda_graph_kv_indices if others else None
        super().__init__(runner, RequestLayout(0, self.max_rows), inputs, sizes, "forwards", slots)

    @property
    def rows(self) -> list[int]:
        """Of the graphs, ascending."""
        return [size * self.inputs.width for size in self.capture_bs]

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether a graph runs this causal forward."""
        prefix_lens, lens = batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
        is_near = self.attn_backend.splits or max(prefix_lens) <= MAX_CONTEXT
        return is_near and sum(lens) <= self.max_rows and len(lens) <= self.max_reqs

    def run(self, batch: ForwardBatch) -> tuple[LogitsProcessorOutput, int]:
        """Runs a forward as SGLang's runner does; also returns the rows of the graph."""
        num_rows = len(batch.input_ids)
        size = self.padded(-(-num_rows // self.inputs.width))
        self._put(batch, size)
        self.replay(size)
        hidden, *aux = (rows[:num_rows] for rows in self.states)
        context = ForwardContext(attn_backend=self.model_runner.attn_backend)
        with torch.no_grad(), forward_context(context, forward_batch=batch):
            output = self.head(hidden, batch, *([aux] if aux else []))
        return output, size * self.inputs.width

    def _put(self, batch: ForwardBatch, size: int) -> None:
        """Writes the inputs of a graph; behind the requests comes the padding's."""
        inputs, num_rows, num_reqs = self.inputs, len(batch.input_ids), batch.batch_size
        padded, last = size * inputs.width, inputs.num_reqs(size) - 1
        live = (batch.input_ids, batch.positions, batch.out_cache_loc)
        for static, part in zip((inputs.ids, inputs.positions, inputs.slots), live, strict=True):
            static[:num_rows] = part
            static[num_rows:padded] = 0  # SGLang's padding slot, whose KV is never read
        counts = (batch.req_pool_indices, batch.extend_prefix_lens, batch.extend_seq_lens)
        statics = (inputs.pools, inputs.starts, inputs.lens)
        for static, part, rest in zip(statics, counts, (0, 0, padded - num_rows), strict=True):
            static[:num_reqs] = part
            static[num_reqs : last + 1] = 0
            static[last].fill_(rest)


def capture(runner: Any, max_rows: int = MAX_ROWS) -> list[PassGraphs]:
    """Captures a model's forwards, smallest first; none, and a line in the log, where its forwards
    need more than ``WideInputs``, or the capture fails."""
    has_steps, num_reqs = bool(runner.decode_cuda_graph_capture_bs), runner.req_to_token_pool.size
    has_adapters = runner.lora_manager is not None
    why = obstacle(runner.model_config, has_steps=has_steps, has_adapters=has_adapters)
    found: list[PassGraphs] = []
    try:
        for unit, sizes in {} if why else unit_sizes(max_rows, num_reqs).items():
            found.append(PassGraphs(runner, unit, sizes, found))
    except Exception as error:
        # On one rank alone it may have failed.
        if is_forced() or get_parallel().tp_size > 1:
            raise
        why = f"their capture failed: {error!r}"
    if why:
        logger.info("PARSE: forwards of the %s run in pieces: %s", model_name(runner), why)
    return found


def unit_sizes(max_rows: int, num_reqs: int) -> dict[int, tuple[int, ...]]:
    """Rows of a unit -> units of its graphs, with up to ``max_rows``; ``num_reqs``: of the pool."""
    fitting = {
        unit: tuple(n for n in counts if n * unit <= max_rows and n <= num_reqs)
        for unit, counts in ROWS.items()
    }
    return {unit: sizes for unit, sizes in fitting.items() if sizes}


def is_forced() -> bool:
    """Whether graphs stay whatever ``graph_check`` finds."""
    return os.environ.get(ENV_VAR) == "1"


def is_off() -> bool:
    """Whether passes have no graphs of PARSE's, whatever would fit."""
    return os.environ.get(ENV_VAR) == "0"


def obstacle(model: Any, *, has_steps: bool = True, has_adapters: bool = False) -> str:
    """Why the forwards of a ``ModelConfig`` are not captured; "" if they are. ``has_steps``: its
    decode steps are captured."""
    attention = attention_of(model)
    obstacles = {
        f"{ENV_VAR} is 0": is_off(),
        "its decode steps have no CUDA graphs": not has_steps,
        "it serves adapters": has_adapters,
        "its positions have three axes": model.model_is_mrope,
        attention.value: attention not in SERVED,
    }
    return next((text for text, is_so in obstacles.items() if is_so), "")
