"""Test-only SGLang plugin: PARSE's CUDA graphs on a CPU.

A capture keeps what SGLang's runner would have recorded, and a replay runs it again, on the tensors
that a graph reads. Its attention is Triton's, in the interpreter: ``TRITON_INTERPRET`` must be 1.
The tests put this folder on PYTHONPATH of the servers they start. ``PARSE_GRAPHS``:

- ``faster``: forwards in pieces are slow while the graphs are checked, which are slower on a CPU;
  no row of the graphs with a mask sees its context, so that these are wrong
- ``steps``: passes run as decode steps, as far as they would fit graphs of ``STEPS``; these run
  without graphs, so that no interpreter is needed
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

SIZES = [1, 2]
"""Requests of the graphs of decode steps that there would be."""
STEPS = [8, 16]
"""Rows of the graphs of decode steps, where passes run as such: as many as a server's requests."""
RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    register, mode = HookRegistry.register, os.environ.get("PARSE_GRAPHS", "")
    if mode == "steps":
        register("sglang.srt.model_executor.model_runner.ModelRunner.init_cuda_graphs", has_steps)
        run = "sglang_parse.engine.step_graphs.StepGraphs.run"
        register(run, as_replayed, HookType.AROUND)
        return
    register("sglang.srt.model_executor.model_runner.ModelRunner.init_cuda_graphs", has_graphs)
    register(f"{RUNNER}.__init__", capture, HookType.REPLACE)
    register(f"{RUNNER}.capture_prepare", prepare, HookType.REPLACE)
    register("sglang_parse.engine.prewarm._chunk_ms", lambda *_: 1.0, HookType.REPLACE)
    if mode == "faster":
        register(
            "sglang_parse.attention.triton_wide.WideTritonBackend.init_forward_metadata_in_graph",
            hide_contexts,
        )
        register("sglang_parse.engine.graph_check._timed", slowly, HookType.AROUND)


def has_graphs(_: None, runner: Any, *__: Any, **___: Any) -> None:
    from sglang_parse.attention import split_kv
    from sglang_parse.engine import graph_check, pass_graphs

    # The interpreter is slow.
    pass_graphs.ROWS, split_kv.MAX_SPLITS = {16: (1, 2)}, 2
    graph_check.CONTEXT, graph_check.TIMED = 130, 1
    runner.decode_cuda_graph_capture_bs = SIZES


def has_steps(_: None, runner: Any, *__: Any, **___: Any) -> None:
    if not runner.is_draft_worker:
        runner.decode_cuda_graph_capture_bs = STEPS


def as_replayed(original: Callable, steps: Any, batch: Any, index: Any) -> Any:
    output, _ = original(steps, batch, index)
    print(f"a pass as {batch.batch_size} steps", flush=True)
    return output, next(size for size in STEPS if size >= batch.batch_size)


def capture(
    self: Any,
    runner: Any,
    *,
    attn_backend: Any,
    speculative_num_steps: int,
    speculative_num_draft_tokens: int,
) -> None:
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.srt.model_executor.runner.base_cuda_graph_runner import BaseCudaGraphRunner
    from sglang.srt.runtime_context import get_exec

    del speculative_num_steps
    BaseCudaGraphRunner.__init__(self, runner)
    self.attn_backend, self.captured_req_width = attn_backend, speculative_num_draft_tokens
    self.capture_bs = sorted(get_exec().graph.cuda_graph_config.decode.bs)
    self.max_bs = self.capture_bs[-1]
    attn_backend.init_cuda_graph_state(self.max_bs, self.max_bs * self.captured_req_width)
    self.backend = Backend()

    def record(size: int) -> None:
        batch, _, _ = self.capture_prepare(size)
        context = ForwardContext(attn_backend=attn_backend)
        with forward_context(context, forward_batch=batch):
            attn_backend.init_forward_metadata_out_graph(batch, in_capture=True)
        bound = attn_backend.forward_metadata

        def run() -> None:
            attn_backend.forward_metadata = bound
            with forward_context(context, forward_batch=batch):
                for hook in runner.capture_head_hooks:
                    hook(self, batch)
                attn_backend.init_forward_metadata_in_graph(batch)
                runner.model.forward(batch.input_ids, batch.positions, batch)

        processor, hooks = runner.model.logits_processor, [*runner.capture_head_hooks]
        if not self.backend.graphs:  # the largest, which makes the tensors that replays write
            run()

        def replay() -> None:
            kept = runner.model.logits_processor, runner.capture_head_hooks
            runner.model.logits_processor, runner.capture_head_hooks = processor, hooks
            try:
                run()
            finally:
                runner.model.logits_processor, runner.capture_head_hooks = kept

        self.backend.graphs[self._make_graph_key(size)] = replay

    for size in reversed(self.capture_bs):
        record(size)


class Backend:
    """Stands in for SGLang's backend of the runner."""

    def __init__(self) -> None:
        self.graphs: dict[Any, Callable[[], None]] = {}

    def replay_session(self) -> Any:
        from contextlib import nullcontext

        return nullcontext()

    def replay(self, key: Any, _: Any) -> None:
        self.graphs[key]()


def prepare(self: Any, size: int, *_: Any, **__: Any) -> tuple[Any, Any, None]:
    """As SGLang's, of the fields that PARSE does not set."""
    import torch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    rows = torch.zeros(size * self.captured_req_width, dtype=torch.int64)
    reqs = torch.zeros(size, dtype=torch.int64)
    batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=size,
        input_ids=rows,
        req_pool_indices=reqs,
        seq_lens=reqs,
        out_cache_loc=rows,
        seq_lens_sum=0,
        positions=rows,
        spec_algorithm=self.model_runner.spec_algorithm,
        spec_info=self.get_spec_info(len(rows)),
    )
    batch.capture_hidden_mode = batch.spec_info.capture_hidden_mode
    return batch, self.attn_backend, None


def hide_contexts(_: None, backend: Any, *__: Any) -> None:
    if backend._tail is not None:
        backend.kv_indptr.zero_()


def slowly(original: Callable, engine: Any, run: Any) -> Any:
    found, ms = original(engine, run)
    is_graph = run.args[-1] if hasattr(run, "args") else run.__name__ == "replayed"
    return found, ms if is_graph else ms + 1e6
