"""Causal forwards as CUDA graphs of so many rows, without a GPU: what a replay reads and what
becomes of its rows. Attention of such graphs: ``test_attention_backends``; whole servers with them:
``tests/e2e/test_graphs.py``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_parse.attention.spec_input import ParseVerifyInput, forward_mode_of
from sglang_parse.core.layout import RequestLayout, VerifyLayout
from sglang_parse.engine import graph_check, pass_graphs
from sglang_parse.engine.graph_check import DIFFERENT, SLOWER, TOLERANCE, GraphCheck
from sglang_parse.engine.pass_graphs import MAX_CONTEXT, PassGraphs
from sglang_parse.engine.wide_graphs import WideInputs

pytestmark = pytest.mark.compat

UNIT, SIZES, MAX_REQS, HIDDEN, VOCAB = 5, [1, 2, 4, 8], 4, 6, 11
RAGGED = VerifyLayout.of([RequestLayout(7, 3), RequestLayout(2, 5), RequestLayout(9, 1)])


def graphs_of(num_aux: int = 0) -> Any:
    """Graphs of 5, 10, 20 and 40 rows, whose replay computes hidden states from what they read."""
    graphs = object.__new__(PassGraphs)
    generator = torch.Generator().manual_seed(1)
    tables = [torch.randn(100, HIDDEN, generator=generator) for _ in range(4 + num_aux)]
    lm_head = torch.randn(VOCAB, HIDDEN, generator=generator)
    inputs = WideInputs(UNIT, SIZES[-1], "cpu", 1 + MAX_REQS)
    parts = inputs.ids, inputs.positions, inputs.slots, inputs.pools, inputs.starts, inputs.lens
    for part in parts:
        part.fill_(77)  # of an earlier replay

    def states(ids: Any, positions: Any, slots: Any) -> list[torch.Tensor]:
        hidden = tables[0][ids] + tables[1][positions] + tables[2][slots]
        return [hidden, *(hidden + table[ids] for table in tables[4:])]

    def replay(size: int) -> None:
        rows = slice(size * UNIT)
        found = states(inputs.ids[rows], inputs.positions[rows], inputs.slots[rows])
        graphs.keep(found)

    def head(hidden: Any, batch: Any, *aux: Any) -> Any:
        assert bool(aux) is bool(num_aux)
        logits = hidden[batch.spec_info.select_index] @ lm_head.T
        captured = torch.cat([hidden, *(part for parts in aux for part in parts)], 1)
        return SimpleNamespace(next_token_logits=logits, hidden_states=captured)

    vars(graphs).update(
        inputs=inputs,
        capture_bs=SIZES,
        max_rows=UNIT * SIZES[-1],
        max_reqs=MAX_REQS,
        attn_backend=SimpleNamespace(splits=False),
        model_runner=SimpleNamespace(attn_backend=None),
        replay=replay,
        head=head,
        states=[torch.zeros(8 * UNIT, HIDDEN) for _ in range(1 + num_aux)],
    )
    return graphs, states


def batch_of(layout: VerifyLayout, selected: list[int]) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    num_rows, num_reqs = layout.num_rows, len(layout.requests)
    batch = ForwardBatch(
        forward_mode=forward_mode_of(layout),
        batch_size=num_reqs,
        input_ids=torch.arange(num_rows) + 1,
        req_pool_indices=torch.arange(num_reqs) + 4,
        seq_lens=torch.tensor([part.kv_len for part in layout.requests]),
        seq_lens_sum=0,
        out_cache_loc=torch.arange(num_rows) + 20,
        positions=torch.tensor(layout.positions()),
        spec_info=ParseVerifyInput(
            layout=layout, custom_mask=None, select_index=torch.tensor(selected)
        ),
    )
    batch.extend_prefix_lens_cpu = [part.prefix_len for part in layout.requests]
    batch.extend_seq_lens_cpu = [part.num_rows for part in layout.requests]
    batch.extend_prefix_lens = torch.tensor(batch.extend_prefix_lens_cpu).to(torch.int32)
    batch.extend_seq_lens = torch.tensor(batch.extend_seq_lens_cpu).to(torch.int32)
    return batch


@pytest.mark.parametrize("num_aux", [0, 2])
def test_a_replay_gives_the_rows_of_the_pass(num_aux: int):
    (graphs, states), batch = graphs_of(num_aux), batch_of(RAGGED, [0, 2, 5, 8])
    for _ in range(2):  # the second replay finds the first one's buffers
        output, num_rows = graphs.run(batch)
        assert num_rows == 2 * UNIT  # of 9
        hidden, *aux = states(batch.input_ids, batch.positions, batch.out_cache_loc)
        expected = graphs.head(hidden, batch, *([aux] if aux else []))
        assert torch.equal(output.next_token_logits, expected.next_token_logits)
        assert torch.equal(output.hidden_states, expected.hidden_states)


def test_padding_writes_to_sglangs_padding_slot_and_is_a_request_without_context():
    graphs, _ = graphs_of()
    graphs.run(batch_of(RAGGED, [0]))
    inputs = graphs.inputs
    assert inputs.slots[:10].tolist() == [*range(20, 29), 0]
    assert inputs.slots[10:].eq(77).all()
    assert [inputs.num_reqs(size) for size in SIZES] == [1 + MAX_REQS] * 4
    assert inputs.starts.tolist() == [7, 2, 9, 0, 0]
    assert inputs.pools.tolist() == [4, 5, 6, 0, 0]
    assert inputs.lens.tolist() == [3, 5, 1, 0, 1]
    # One more row is one more graph; a full one has no padding.
    graphs.run(batch_of(VerifyLayout.of([RequestLayout(3, 5), RequestLayout(0, 5)]), [0]))
    assert inputs.lens.tolist() == [5, 5, 0, 0, 0]


def test_a_small_graph_has_room_for_few_requests():
    inputs = WideInputs(2, 8, "cpu", 1 + 6)
    assert [inputs.num_reqs(size) for size in (1, 2, 8)] == [3, 5, 7]


@pytest.mark.parametrize("is_asked", [True, False])
@pytest.mark.parametrize("is_deterministic", [True, False])
@pytest.mark.parametrize("use_mla", [True, False])
def test_attention_is_a_kernel_that_leaves_out_the_contexts_mask(
    is_asked: bool, is_deterministic: bool, use_mla: bool, monkeypatch: pytest.MonkeyPatch
):
    """With deterministic inference, too: the graphs never write that part of the mask. Then nothing
    depends on the number of requests, either."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    from sglang_parse.attention.split_kv import ENV_VAR
    from sglang_parse.attention.triton_wide import WideTritonBackend

    monkeypatch.setenv(ENV_VAR, str(int(is_asked)))

    def init(backend: Any, _: Any) -> None:
        backend.enable_deterministic, backend.use_mla = is_deterministic, use_mla

    monkeypatch.setattr(TritonAttnBackend, "__init__", init)
    asks, model = RequestLayout(0, 2, (1,), (2,)), torch.nn.Module()
    runner = SimpleNamespace(device="cpu", dtype=torch.bfloat16, model=model)
    backend = WideTritonBackend(runner, asks)
    assert not backend.enable_deterministic
    # SGLang's buffers of decode steps, and its mask, which nothing here reads.
    assert (backend.max_kv_splits, backend.num_draft_tokens) == (1, None)
    assert backend.splits is (is_asked and not is_deterministic and not use_mla)
    assert backend._tail is not None


@pytest.mark.parametrize(
    ("changed", "gpu", "splits"),
    [
        ({}, "h100", True),
        ({"head_dim": 256}, "h100", True),
        ({"head_dim": 256}, "a100", True),
        ({"head_dim": 256}, "l40s", True),
        ({"head_dim": 512}, "l40s", False),
        ({"logit_cap": 30.0}, "h100", False),
        ({"sliding_window_size": 128}, "h100", False),
        ({"v_head_dim": 64}, "h100", False),
    ],
)
def test_which_layers_are_split(
    changed: dict, gpu: str, splits: bool, monkeypatch: pytest.MonkeyPatch
):
    """At a head_dim of 256 GPUs with less shared memory load smaller tiles."""
    from sglang.srt.layers.radix_attention import RadixAttention

    from sglang_parse.attention import triton_wide
    from sglang_parse.attention.split_kv import tiles_that_fit

    memory = {"h100": 227 << 10, "a100": 163 << 10, "l40s": 99 << 10}
    monkeypatch.setattr(triton_wide, "device_limits", lambda: (132, memory[gpu]))
    sizes = {"num_heads": 2, "head_dim": 128, "scaling": 1.0, "num_kv_heads": 1, "layer_id": 0}
    layer = RadixAttention(**(sizes | changed))
    model = torch.nn.ModuleList([layer])
    runner = SimpleNamespace(device="cpu", dtype=torch.bfloat16, model=model)
    assert triton_wide._is_plain(runner) is splits
    tiles = {name: tiles_that_fit(256, 2, size) for name, size in memory.items()}
    assert tiles == {"h100": (64, 2), "a100": (64, 1), "l40s": (32, 1)}


@pytest.mark.parametrize(
    ("requests", "fits"),
    [
        ([RequestLayout(7, 40)], True),
        ([RequestLayout(7, 41)], False),
        ([RequestLayout(7, 37), *[RequestLayout(7, 1)] * 3], True),
        ([RequestLayout(7, 1)] * 5, False),
        ([RequestLayout(MAX_CONTEXT, 1)], True),
        ([RequestLayout(MAX_CONTEXT + 1, 1)], False),
    ],
    ids=["most", "rows", "one draft beside decoding", "requests", "long", "too long"],
)
def test_which_passes_fit(requests: list[RequestLayout], fits: bool):
    graphs, _ = graphs_of()
    batch = batch_of(VerifyLayout.of(requests), [0])
    assert graphs.fits(batch) is fits
    graphs.attn_backend.splits = True
    assert graphs.fits(batch) is (fits or requests[0].prefix_len > MAX_CONTEXT)


@pytest.mark.parametrize(
    ("changed", "captured", "why"),
    [
        ({}, [(16, 128), (128, 1024)], ""),
        ({"max_rows": 2048}, [(16, 128), (128, 2048)], ""),
        ({"backend": "fa3"}, [(16, 128), (128, 1024)], ""),
        ({"backend": "flashinfer"}, [(16, 128), (128, 1024)], ""),
        ({"attention": "WINDOWS"}, [(16, 128), (128, 1024)], ""),
        ({"num_reqs": 3}, [(16, 48), (128, 384)], ""),
        ({"environment": "0"}, [], "SGLANG_PARSE_PASS_GRAPHS is 0"),
        ({"decode_cuda_graph_capture_bs": []}, [], "its decode steps have no CUDA graphs"),
        ({"lora_manager": object()}, [], "it serves adapters"),
        ({"model_is_mrope": True}, [], "its positions have three axes"),
        ({"attention": "LATENT"}, [], "latent attention (MLA)"),
        (
            {"error": RuntimeError("out of resources")},
            [],
            "their capture failed: RuntimeError('out",
        ),
    ],
)
def test_what_is_captured(
    changed: dict,
    captured: list[tuple[int, int]],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """Whatever the model's attention backend; where nothing is, the log says why."""
    from sglang.srt.runtime_context import get_parallel

    from sglang_parse.attention.support import Attention

    made = []

    class Graphs:
        def __init__(self, _: Any, unit: int, sizes: tuple[int, ...], others: list) -> None:
            assert len(others) == len(made)
            if "error" in changed:
                raise changed["error"]
            made.append((unit, unit * sizes[-1]))

    monkeypatch.setattr(pass_graphs, "PassGraphs", Graphs)
    attention = Attention[changed.get("attention", "FULL")]
    monkeypatch.setattr(pass_graphs, "attention_of", lambda _: attention)
    monkeypatch.delenv(pass_graphs.ENV_VAR, raising=False)
    if "environment" in changed:
        monkeypatch.setenv(pass_graphs.ENV_VAR, changed["environment"])
    config = SimpleNamespace(model_is_mrope=changed.get("model_is_mrope", False))
    runner = SimpleNamespace(
        model_config=config,
        is_draft_worker=False,
        req_to_token_pool=SimpleNamespace(size=changed.get("num_reqs", 48)),
        decode_cuda_graph_capture_bs=changed.get("decode_cuda_graph_capture_bs", [1, 2]),
        lora_manager=changed.get("lora_manager"),
        prefill_attention_backend_str=changed.get("backend", "triton"),
    )
    with get_parallel().override(tp_size=1), caplog.at_level("INFO"):
        found = pass_graphs.capture(runner, changed.get("max_rows", pass_graphs.MAX_ROWS))
    assert len(found) == len(made)
    assert made == captured
    assert (f"PARSE: forwards of the target run in pieces: {why}" in caplog.text) is bool(why)
    if "error" in changed:  # forced, or on one of several ranks, it is an error
        monkeypatch.setenv(pass_graphs.ENV_VAR, "1")
        with get_parallel().override(tp_size=1), pytest.raises(RuntimeError, match="resources"):
            pass_graphs.capture(runner)


# -- the check at start -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "regret", "ms", "fault"),
    [
        (0.1, 0.0, 1.0, ""),
        (0.1, 0.1, 3.0, SLOWER),
        (0.2, 0.0, 1.0, DIFFERENT),
        (0.1, 0.2, 1.0, DIFFERENT),
        (float("nan"), 0.0, 1.0, DIFFERENT),
    ],
)
def test_what_a_graphs_check_finds(error: float, regret: float, ms: float, fault: str):
    check = GraphCheck(error, regret, ms, pieces_ms=2.0)
    assert check.fault(torch.bfloat16) == fault
    assert TOLERANCE[torch.float32] < TOLERANCE[torch.float16] < TOLERANCE[torch.bfloat16]


def test_rows_and_choices_are_compared_one_by_one():
    expected = torch.tensor([[4.0, 3.0, 0.0, 0.0], [0.0, 0.0, 5.0, 0.0]])
    assert graph_check._error(expected, expected) == graph_check._regret(expected, expected) == 0
    other = expected.clone()
    other[1, 2] = 4.0
    assert graph_check._error(other, expected) == pytest.approx(0.2)
    assert graph_check._regret(other, expected) == 0
    other[0, 1] = 5.0  # another choice: one of 4 - 1.75 less
    assert graph_check._regret(other, expected) == pytest.approx(1 / 2.25)
    other[1, 0] = torch.nan
    assert torch.isnan(torch.tensor(graph_check._error(other, expected)))


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize("fault", ["", DIFFERENT, SLOWER])
def test_a_graph_that_is_wrong_or_slower_is_off(
    fault: str, is_forced: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """One line in the log, with the figures, and the metric; a variable keeps it all the same."""
    monkeypatch.setattr(graph_check, "broadcast_object", lambda value: value)
    monkeypatch.setenv(pass_graphs.ENV_VAR, "1" if is_forced else "")
    rows = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(2))
    other = rows * (1.5 if fault == DIFFERENT else 1.001)
    times = {"graph": 9.0 if fault == SLOWER else 2.0, "pieces": 4.0}
    monkeypatch.setattr(
        graph_check, "_timed", lambda _, run: ((other if run == "graph" else rows,), times[run])
    )
    runner = SimpleNamespace(dtype=torch.float32)
    engine: Any = SimpleNamespace(
        counters=SimpleNamespace(graphs={}),
        verifier=SimpleNamespace(target=SimpleNamespace(runner=runner)),
    )
    ways: Any = ("graph", "pieces")
    with caplog.at_level("INFO"):
        found = graph_check._fault(engine, "target: passes", ways)
    assert found == ("" if is_forced else fault)
    ratio = 4.0 / times["graph"]
    assert engine.counters.graphs == {"target: passes": 0.0 if found else ratio}
    assert len(caplog.messages) == bool(fault)
    for line in caplog.messages:
        assert line.startswith(f"PARSE: {'forced' if is_forced else 'no'} CUDA graph of the target")
        assert f"{fault} in pieces: rows differ by" in line
        assert f"{times['graph']:.2f} ms, in pieces 4.00" in line


@pytest.mark.parametrize(
    ("faults", "rows"),
    [
        ([], [20, 40]),
        ([SLOWER], [40]),
        ([DIFFERENT], [40]),
        (["", SLOWER], [10, 40]),
        (["", DIFFERENT], [40]),
        (["", "", SLOWER], [20]),
    ],
)
def test_graphs_are_used_up_to_the_rows_at_which_they_are_slower(
    faults: list[str], rows: list[int], monkeypatch: pytest.MonkeyPatch
):
    """All sizes of those that differ are off."""
    names, left = [], [*faults, *[""] * 9]
    monkeypatch.setattr(
        graph_check, "_fault", lambda _, name, __: (names.append(name), left.pop(0))[1]
    )

    def graphs(unit: int, sizes: list[int]) -> Any:
        rows = [unit * size for size in sizes]
        return SimpleNamespace(rows=rows, max_rows=rows[-1], name=f"target: x{unit}")

    given = [graphs(10, [1, 2]), graphs(20, [2])]
    engine: Any = None
    found = graph_check._usable(engine, engine, [7, 2], 99, lambda *_: None, given)
    assert [one.max_rows for one in found] == rows
    assert names[0] == "target: x10 of 10 rows"


# -- in an iteration --------------------------------------------------------------------


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "changed", [{}, {"hicache_consumer_index": 0}, {"input_embeds": 1}], ids=str
)
def test_a_prompt_of_few_tokens_replays_one_too(changed: dict):
    """Unless it is no text, or reads KV that is on its way from the host: that waits by layer."""
    from sglang_parse.core.phases import Action, Phase
    from support import fake_engine

    batch = fake_engine.prefill_batch_of(fake_engine.request(0, Phase.DECODING, Action.DECODE))
    for name, value in changed.items():
        setattr(batch, name, value)
    target, replayed = fake_engine.engine_for(batch).verifier.target, []

    def run(given: Any) -> Any:
        replayed.append(given.extend_seq_lens_cpu)
        logits = torch.zeros(1, fake_engine.VOCAB, device=fake_engine.GPU)
        return SimpleNamespace(next_token_logits=logits, hidden_states=None), 32

    target.pass_graphs = [SimpleNamespace(fits=lambda _: True, run=run)]
    forward = target.prefill(batch)
    assert replayed == ([] if changed else [[fake_engine.PROMPT]])
    assert len(target.runner.forwards) == bool(changed)
    assert changed or forward.result.can_run_cuda_graph


@pytest.mark.usefixtures("gpu")
def test_passes_replay_the_smallest_graph_that_fits():
    """A pass is one replay and no forward of SGLang's runner; one that asks questions is none."""
    from sglang_parse.core.phases import Action, Phase
    from support import fake_engine

    def replays(*widths: int, asks: bool) -> tuple[list[int], int]:
        found: list[int] = []

        class Graphs:
            def __init__(self, width: int) -> None:
                self.width = width

            def fits(self, batch: Any) -> bool:
                return max(batch.extend_seq_lens_cpu) <= self.width

            def run(self, batch: Any) -> Any:
                found.append(self.width)
                assert batch.forward_mode.name == "EXTEND"
                num_rows = sum(batch.extend_seq_lens_cpu)
                logits = torch.zeros(num_rows, fake_engine.VOCAB, device=fake_engine.GPU)
                return SimpleNamespace(next_token_logits=logits, hidden_states=None), 4 * self.width

        batch = fake_engine.batch_of(
            fake_engine.request(0, Phase.VERIFYING, Action.VERIFY, draft=5),
            fake_engine.request(1, Phase.DECODING, Action.DECODE),
        )
        if not asks:
            batch.reqs[0].parse_state.ask([], [])
        engine = fake_engine.engine_for(batch, question=fake_engine.QUESTION if asks else None)
        engine.verifier.target.pass_graphs = [Graphs(width) for width in widths]
        step, _ = fake_engine.launched(batch, engine)
        assert step.result.can_run_cuda_graph is bool(found)
        assert step.forward.graphs == tuple(4 * width for width in found or [0])
        return found, len(engine.verifier.target.runner.forwards)

    assert replays(4, 9, 17, asks=False) == ([9], 0)
    assert replays(4, asks=False) == ([], 1)
    assert replays(9, asks=True) == ([], 1)
