"""Passes as graphs of decode steps: which fit, what SGLang is given, and which targets have them.
Whole servers with them: ``tests/e2e/test_steps.py``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_parse.attention.support import Attention
from sglang_parse.core.layout import RequestLayout, VerifyLayout
from sglang_parse.engine import forward, step_graphs
from sglang_parse.engine.forward import RequestRows
from sglang_parse.engine.step_graphs import MAX_READ_BYTES, StepGraphs

pytestmark = pytest.mark.compat
SIZES = [1, 2, 4, 8, 12, 16, 24, 32, 40, 48]
TOKEN_BYTES = 70_000


def runner_of(sizes: list[int] = SIZES, kv: Any = (30_000, 40_000), **more: Any) -> Any:
    pool = SimpleNamespace(size=1, get_kv_size_bytes=lambda: kv)
    parts = {"decode_cuda_graph_capture_bs": sizes, "token_to_kv_pool": pool, "model_config": None}
    return SimpleNamespace(**parts | {"is_draft_worker": False} | more)


@pytest.mark.parametrize(
    ("requests", "fits"),
    [
        ([RequestLayout(300, 4)] * 12, True),
        ([RequestLayout(300, 4)] * 12 + [RequestLayout(300, 1)], False),
        ([RequestLayout(9, 3, visible_lens=(2,), question_lens=(4,))], False),
        ([RequestLayout(MAX_READ_BYTES // TOKEN_BYTES // 3, 4)], True),
        ([RequestLayout(MAX_READ_BYTES // TOKEN_BYTES // 3 + 1, 4)], False),
        ([RequestLayout(MAX_READ_BYTES // TOKEN_BYTES * 2, 1)], True),  # as a step reads it
    ],
    ids=["rows", "more rows", "a question", "long", "longer", "one row"],
)
@pytest.mark.parametrize("kv", [(30_000, 40_000), TOKEN_BYTES], ids=["keys, values", "latent"])
def test_which_passes_are_steps(requests: list[RequestLayout], fits: bool, kv: Any):
    assert StepGraphs(runner_of(kv=kv)).fits(VerifyLayout.of(requests)) is fits


def test_few_graphs_are_checked():
    """Of sizes that double, so that a start does not wait for each."""
    assert StepGraphs(runner_of()).rows == [12, 24, 48]
    assert StepGraphs(runner_of([1, 2, 4])).rows == [4]
    assert StepGraphs(runner_of([*range(8, 513, 8)])).rows == [8, 16, 32, 64, 128, 256, 512]


@pytest.mark.parametrize(
    ("attention", "sizes", "variable", "has_some"),
    [
        (Attention.LATENT, SIZES, "", True),
        (Attention.POOLS, SIZES, "1", True),
        (Attention.FULL, SIZES, "", True),
        (Attention.LATENT, [], "", False),
        (Attention.LATENT, SIZES, "0", False),
        (Attention.STATES, SIZES, "", False),
    ],
)
def test_which_targets_have_them(
    monkeypatch: pytest.MonkeyPatch,
    attention: Attention,
    sizes: list[int],
    variable: str,
    has_some: bool,
):
    monkeypatch.setenv("SGLANG_PARSE_PASS_GRAPHS", variable)
    monkeypatch.setattr(step_graphs, "attention_of", lambda _: attention)
    assert bool(step_graphs.capture(runner_of(sizes))) is has_some


def test_a_row_is_a_step_behind_the_rows_before_it(monkeypatch: pytest.MonkeyPatch):
    """Of the same request; logits are those of the rows that need them, hidden states of all."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch

    seen: list[Any] = []

    def init_new(view: Any, _: Any, **modes: Any) -> Any:
        seen.append((view, modes))
        return SimpleNamespace(
            positions=view.seq_lens - 1,
            mrope_positions=torch.zeros(3, len(view.reqs)),
            batch_size=len(view.reqs),
        )

    def run(batch: Any) -> Any:
        rows = torch.arange(batch.batch_size)[:, None]
        output = LogitsProcessorOutput(next_token_logits=rows, hidden_states=10 * rows)
        return SimpleNamespace(logits_output=output, can_run_graph=True)

    monkeypatch.setattr(ForwardBatch, "init_new", init_new)
    table = torch.arange(60).view(3, 20)
    reqs = [
        SimpleNamespace(kv=SimpleNamespace(req_pool_idx=row), name=name)
        for row, name in ((2, "a"), (1, "b"))
    ]
    batch = SimpleNamespace(
        reqs=reqs,
        device="cpu",
        req_pool_indices=torch.tensor([2, 1]),
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        multimodal_inputs=[None, SimpleNamespace(mrope_position_delta=7)],
    )
    parts = [
        RequestRows(1, RequestLayout(5, 3), [11, 12, 13], (1, 2), 2),
        RequestRows(0, RequestLayout(9, 1), [21], (0,), 1),
    ]
    runner = runner_of(forward=run)
    target = SimpleNamespace(runner=runner, step_graphs=[StepGraphs(runner)], graphs_of=None)
    found = forward.run_forward(target, batch, parts, is_masked=True, capture=True)
    ((view, modes),) = seen
    assert view.forward_mode.is_decode()
    assert view.spec_info is None
    assert modes["capture_hidden_mode"] is CaptureHiddenMode.FULL
    assert [req.name for req in view.reqs] == ["b", "b", "b", "a"]
    assert view.req_pool_indices.tolist() == [1, 1, 1, 2]
    assert view.seq_lens.tolist() == view.seq_lens_cpu.tolist() == [6, 7, 8, 10]
    assert view.out_cache_loc.tolist() == [25, 26, 27, 49]
    assert view.input_ids.tolist() == [11, 12, 13, 21]
    assert found.logits.flatten().tolist() == [1, 2, 3]
    assert found.hidden.flatten().tolist() == [0, 10, 20, 30]
    assert found.graph == 4
