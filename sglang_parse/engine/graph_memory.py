"""What PARSE keeps on a GPU beside SGLang's pools, from settings and shapes alone: for
``sglang-parse doctor``, and for the log of a start, beside what its CUDA graphs took.

Tensors that stay are counted: slots of contexts, parts of attention, masks, hidden states, logits.
Activations are not: all graphs share a pool, in which SGLang's prefills have more rows; nor are
SGLang's buffers of decode steps, some MB for each kind of graph, which nothing reads.
"""

from __future__ import annotations

import os
from typing import Any

from sglang_parse.attention.split_kv import ENV_VAR, SplitKV
from sglang_parse.core.block import BlockKind, Masks
from sglang_parse.core.config import ParseConfig
from sglang_parse.engine import pass_graphs
from sglang_parse.engine.drafting.block_graphs import LOGITS_ROWS
from sglang_parse.engine.forward import MAX_LOGITS_BYTES
from sglang_parse.engine.wide_graphs import MAX_DRAFT_ROWS, graph_sizes_of
from sglang_parse.startup.heads import captures_steps
from sglang_parse.startup.parallel import parallel_draft

SLOT_BYTES, FP32_BYTES = 8, 4


class GraphMemory:
    """Bytes on each GPU.

    Args:
        args: SGLang's resolved settings.
        target, draft: their ``ModelConfig``; ``draft`` None without a draft model.
    """

    def __init__(self, args: Any, config: ParseConfig, target: Any, draft: Any) -> None:
        self._args, self._config, self._target, self._draft = args, config, target, draft
        self._captured = args.cuda_graph_config.decode.bs if captures_steps(args) else []
        self._num_reqs = args.max_running_requests or pass_graphs.MAX_REQS
        self._splits = not args.enable_deterministic_inference and os.environ.get(ENV_VAR) != "0"

    def of_graphs(self) -> dict[str, int]:
        """What CUDA graphs keep, by what they run; empty without them."""
        if not self._captured:
            return {}
        target, draft, adapters = self._target, self._draft, bool(self._args.enable_lora)
        passes = self._of_forwards(target, pass_graphs.MAX_ROWS, has_adapters=adapters)
        step = SLOT_BYTES * max(self._captured) * target.context_len
        found = {"graphs of passes": passes}
        if self._config.proposer:
            found["graphs of proposals"] = step * self._args.speculative_num_steps
        if draft is None:
            return found
        kinds = parallel_draft(self._config, draft).kinds
        blocks = [self._of_blocks(kind) for kind in kinds if kind.masks is not Masks.NONE]
        return found | {
            "graphs of draft steps": step,
            "graphs of draft prefills": self._of_forwards(draft, pass_graphs.MAX_PREFILL_ROWS),
            "graphs of blocks": sum(blocks),
            "logits of blocks": _logits_bytes(draft, LOGITS_ROWS) if blocks else 0,  # of all kinds
        }

    def of_logits(self) -> int:
        """Of the largest verify pass, while it runs."""
        rows = self._num_reqs * (1 + self._config.draft_tokens + self._config.max_questions)
        most = MAX_LOGITS_BYTES // (FP32_BYTES * self._target.vocab_size)
        chunk = self._args.chunked_prefill_size  # -1: not bounded
        return _logits_bytes(self._target, min(rows, most, chunk if chunk > 0 else most))

    def _of_forwards(self, model: Any, max_rows: int, *, has_adapters: bool = False) -> int:
        if pass_graphs.obstacle(model, has_adapters=has_adapters):
            return 0
        max_reqs = 1 + min(pass_graphs.MAX_REQS, self._num_reqs)
        units = pass_graphs.unit_sizes(max_rows, self._num_reqs)
        rows = [unit * sizes[-1] for unit, sizes in units.items()]
        kept = sum(self._of_rows(model, most, max_reqs, most, is_ragged=True) for most in rows)
        return kept + SLOT_BYTES * max_reqs * self._target.context_len

    def _of_blocks(self, kind: BlockKind) -> int:
        rows, context_len = kind.rows(0), self._target.context_len
        size = graph_sizes_of(rows.num_rows, MAX_DRAFT_ROWS, self._captured)[-1]
        kept = self._of_rows(self._draft, rows.num_rows, size, size * rows.num_rows)
        has_mask = not (rows.is_causal or self._splits)
        mask = size * rows.num_rows * (context_len + rows.num_rows) if has_mask else 0
        # A head's own forwards have a plan each, too.
        num_plans = 1 + (kind.masks is Masks.HEAD) * len({kind.size, 1})
        return kept + mask + num_plans * SLOT_BYTES * size * context_len

    def _of_rows(
        self, model: Any, width: int, max_reqs: int, num_rows: int, *, is_ragged: bool = False
    ) -> int:
        """Hidden states of all rows, and parts of attention, as ``WideTritonBackend`` has them."""
        hidden = num_rows * model.hidden_size * model.dtype.itemsize
        if not self._splits:
            return hidden
        ranks, most = self._args.tp_size, num_rows if is_ragged else 0
        heads = model.num_attention_heads // ranks, model.get_num_kv_heads(ranks), model.v_head_dim
        sizes = width, max_reqs, self._target.context_len, heads, "meta"
        return hidden + SplitKV(print, *sizes, most).num_bytes


def _logits_bytes(model: Any, num_rows: int) -> int:
    """In the model's dtype and, as they are read, in fp32."""
    return num_rows * model.vocab_size * (model.dtype.itemsize + FP32_BYTES)
