"""Before the first request: runs the forwards that requests will run, so that none of them meets
cold kernels; and those of CUDA graphs in pieces, too (``graph_check``).

Kernels of a graph were loaded when it was captured; attention between its pieces, the judge's, and
those around a forward were not. A request in SGLang's padding row of ``req_to_token``, all of whose
slots are its padding slot, stands for others: what it writes is never read.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_parse.core.block import BlockKind
from sglang_parse.core.phases import Draft, RequestPolicy
from sglang_parse.core.policy.constants import DEFAULTS
from sglang_parse.core.request import RequestState
from sglang_parse.core.stage import Stage, StageTime
from sglang_parse.device import on_device
from sglang_parse.engine.batch import max_forward_rows
from sglang_parse.engine.broadcast import broadcast_object
from sglang_parse.engine.drafting.drafter import Drafter
from sglang_parse.engine.forward import graph_sizes, max_logits_rows
from sglang_parse.engine.graph_check import check_graphs
from sglang_parse.engine.parts import Engine
from sglang_parse.engine.wide_graphs import SIZES

logger = logging.getLogger(__name__)

PADDING_ROW = 0
WITHOUT_GRAPHS = [64]
"""Rows of passes that run without CUDA graphs."""


@torch.no_grad()
def prewarm(engine: Engine) -> None:
    """Runs a decode step, verify passes and, if there is a draft model, its prefills and forwards
    of each kind. Of graphs it times passes and forwards: without them times depend on what else the
    host does."""
    started = time.perf_counter()
    target, drafter = engine.verifier.target, engine.drafter
    of_draft = drafter and (drafter.model.prefill_graphs or drafter.model.block_graphs)
    if target.pass_graphs or target.step_graphs or of_draft:  # beside SGLang's
        rows = target.runner.req_to_token_pool.free_slots[:2]
        check_graphs(engine, _batch(engine, rows))
    batch = _batch(engine, [PADDING_ROW])
    _run_target(engine, batch)
    if drafter is not None:
        _run_draft(engine, drafter, batch)
    logger.info("PARSE: prewarmed in %.1f s.", time.perf_counter() - started)


def _set_draft(engine: Engine, batch: ScheduleBatch, num_tokens: int, num_asked: int = 0) -> None:
    """Gives the request a draft, with a question about all of it if any is asked."""
    draft = Draft([0] * num_tokens)
    if engine.judge is not None:
        draft.prefix_ends, draft.question_ids = [num_tokens], [(0,) * num_asked]
    batch.reqs[0].parse_state = RequestState(
        RequestPolicy(0.5, engine.config.judge_name),
        draft=draft,
        output_ids=[0],
        committed=1,
        draft_kv_len=1,
        draft_kv_found=True,
    )


def _run_target(engine: Engine, batch: ScheduleBatch) -> None:
    question, verifier = engine.judge and engine.judge.question, engine.verifier
    num_asked = question.max_len if question else 0
    _set_draft(engine, batch, 1)
    verifier.decode(batch, [0]).wait()
    buckets = [size for size in _row_buckets(verifier.target.runner) if size > 1 + num_asked]
    has_graphs = bool(graph_sizes(verifier.target.runner))
    for _ in range(1 + DEFAULTS.cold_forwards if has_graphs else 1):
        passes = [_verify(engine, batch, num_rows, num_asked) for num_rows in buckets]
        if has_graphs:
            engine.controller.observe(broadcast_object(passes), ())


def _verify(engine: Engine, batch: ScheduleBatch, num_rows: int, num_asked: int) -> StageTime:
    _set_draft(engine, batch, num_rows - 1 - num_asked, num_asked)
    watch = engine.timer.start()
    forward = engine.verifier.verify(batch, [0], [])
    forward.wait()
    watch.stop(forward.made)
    assert watch.ms is not None  # the host has waited
    rows, graphs = num_rows, forward.graphs
    return StageTime(Stage.VERIFY, rows, 0, watch.ms, graphs=graphs, num_rows=rows, share=1.0)


def _run_draft(engine: Engine, drafter: Drafter, batch: ScheduleBatch) -> None:
    for num_rows in _row_buckets(drafter.model.draft_runner):
        _set_draft(engine, batch, num_rows)
        drafter.model.extend(batch.reqs, [0], [num_rows])
    kinds = engine.controller.blocks.costs
    for kind in kinds:
        _chunk_ms(engine, drafter, batch, kind, 1)
    graphs = [(x, size) for x in kinds for size in SIZES if drafter.model.has_graph(x, size)]
    for _ in range(1 + DEFAULTS.cold_forwards if graphs else 0):
        times = [_chunk_ms(engine, drafter, batch, kind, size) for kind, size in graphs]
        for (kind, size), ms in zip(graphs, broadcast_object(times), strict=True):
            # By graph: the first requests' chunks may still meet cold kernels around a replay.
            kinds[kind].per_forward.add(size, ms, (size * kind.rows(0).num_rows,))


def _chunk_ms(
    engine: Engine, drafter: Drafter, batch: ScheduleBatch, kind: BlockKind, size: int
) -> float:
    """ms per forward of a short draft chunk of ``size`` requests, all of them the same one."""
    _set_draft(engine, batch, 0)
    chunk, watch = drafter.chunk(kind, batch, [0] * size), engine.timer.start()
    chunk.launch(max(4, 1 + 3 * kind.size // 2))  # four forwards
    chunk.wait()
    watch.stop(chunk.made)
    assert watch.ms is not None  # the host has waited for what follows the chunk
    return watch.ms / chunk.num_forwards


def _row_buckets(runner: Any) -> list[int]:
    """Rows of the model's graphs of prefills, as far as PARSE's passes may have them."""
    limits = max_forward_rows(), max_logits_rows(runner), runner.model_config.context_len // 2
    sizes = graph_sizes(runner) or WITHOUT_GRAPHS
    return [size for size in sizes if size <= min(limits)]


def _batch(engine: Engine, rows: Sequence[int]) -> ScheduleBatch:
    """A batch of greedy requests, of one token and as many slots as the context, in these rows of
    ``req_to_token``."""
    runner = engine.verifier.target.runner
    context_len, vocab_size = runner.model_config.context_len, runner.model_config.vocab_size
    params = SamplingParams(max_new_tokens=context_len, temperature=0.0, ignore_eos=True)
    params.normalize(None)
    reqs = [Req("prewarm", "", array("q", [0]), params, vocab_size=vocab_size) for _ in rows]
    for req, row in zip(reqs, rows, strict=True):
        req.kv.req_pool_idx, req.kv.kv_allocated_len = row, context_len
    batch = ScheduleBatch(
        reqs=reqs,
        device=runner.device,
        model_config=runner.model_config,
        req_pool_indices=on_device(rows, runner.device),
        req_to_token_pool=runner.req_to_token_pool,
        return_logprob=False,
        multimodal_inputs=[None] * len(reqs),
    )
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, vocab_size)
    return batch
