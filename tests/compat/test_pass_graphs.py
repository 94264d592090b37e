"""Verify passes as CUDA graphs of one width, without a GPU: what a replay reads and what becomes of
its rows. Attention of such graphs: ``test_attention_backends``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_parse.attention.spec_input import ParseVerifyInput, forward_mode_of
from sglang_parse.core.layout import RequestLayout, VerifyLayout
from sglang_parse.engine import pass_graphs
from sglang_parse.engine.pass_graphs import MAX_CONTEXT, PassGraphs
from sglang_parse.engine.wide_graphs import WideInputs

pytestmark = pytest.mark.compat

WIDTH, HIDDEN, VOCAB = 5, 6, 11
RAGGED = VerifyLayout.of([RequestLayout(7, 3), RequestLayout(2, 5), RequestLayout(9, 1)])


def graphs_of(num_aux: int = 0) -> Any:
    """Graphs of 1, 2, 4 and 8 requests, whose replay computes hidden states from what they read."""
    graphs = object.__new__(PassGraphs)
    generator = torch.Generator().manual_seed(1)
    tables = [torch.randn(100, HIDDEN, generator=generator) for _ in range(4 + num_aux)]
    lm_head = torch.randn(VOCAB, HIDDEN, generator=generator)
    inputs = WideInputs(WIDTH, 8, "cpu")
    for part in (inputs.ids, inputs.positions, inputs.slots, inputs.pools, inputs.starts):
        part.fill_(77)  # of an earlier replay

    def states(ids: Any, positions: Any, slots: Any) -> list[torch.Tensor]:
        hidden = tables[0][ids] + tables[1][positions] + tables[2][slots]
        return [hidden, *(hidden + table[ids] for table in tables[4:])]

    def replay(size: int) -> None:
        rows = slice(size * WIDTH)
        found = states(inputs.ids[rows], inputs.positions[rows], inputs.slots[rows])
        graphs.keep(found)

    def head(hidden: Any, batch: Any, *aux: Any) -> Any:
        assert bool(aux) is bool(num_aux)
        logits = hidden[batch.spec_info.select_index] @ lm_head.T
        captured = torch.cat([hidden, *(part for parts in aux for part in parts)], 1)
        return SimpleNamespace(next_token_logits=logits, hidden_states=captured)

    vars(graphs).update(
        inputs=inputs,
        capture_bs=[1, 2, 4, 8],
        max_bs=8,
        attn_backend=SimpleNamespace(splits=False),
        model_runner=SimpleNamespace(attn_backend=None),
        replay=replay,
        head=head,
        states=[torch.zeros(8 * WIDTH, HIDDEN) for _ in range(1 + num_aux)],
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
    return batch


@pytest.mark.parametrize("num_aux", [0, 2])
def test_a_replay_gives_the_rows_of_the_pass(num_aux: int):
    (graphs, states), batch = graphs_of(num_aux), batch_of(RAGGED, [0, 2, 5, 8])
    for _ in range(2):  # the second replay finds the first one's buffers
        output, num_rows = graphs.run(batch)
        assert num_rows == 4 * WIDTH
        hidden, *aux = states(batch.input_ids, batch.positions, batch.out_cache_loc)
        expected = graphs.head(hidden, batch, *([aux] if aux else []))
        assert torch.equal(output.next_token_logits, expected.next_token_logits)
        assert torch.equal(output.hidden_states, expected.hidden_states)


def test_padding_writes_to_sglangs_padding_slot_and_sees_nothing():
    graphs, _ = graphs_of()
    graphs.run(batch_of(RAGGED, [0]))
    inputs = graphs.inputs
    slots = inputs.slots[: 4 * WIDTH].view(4, WIDTH)
    assert slots.tolist() == [
        [20, 21, 22, 0, 0],
        [23, 24, 25, 26, 27],
        [28, 0, 0, 0, 0],
        [0, 0, 0, 0, 0],
    ]
    assert inputs.starts[:4].tolist() == [7, 2, 9, 0]
    assert inputs.pools[:4].tolist() == [4, 5, 6, 0]
    assert inputs.slots[4 * WIDTH :].eq(77).all()


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
    asks = RequestLayout(0, 2, (1,), (2,))
    backend = WideTritonBackend(SimpleNamespace(device="cpu"), asks)
    assert not backend.enable_deterministic
    assert backend.splits is (is_asked and not is_deterministic and not use_mla)
    assert backend._tail is not None


@pytest.mark.parametrize(
    ("requests", "fits"),
    [
        ([RequestLayout(7, WIDTH)] * 8, True),
        ([RequestLayout(7, WIDTH)] * 9, False),
        ([RequestLayout(7, 1), RequestLayout(7, WIDTH + 1)], False),
        ([RequestLayout(MAX_CONTEXT, 1)], True),
        ([RequestLayout(MAX_CONTEXT + 1, 1)], False),
    ],
    ids=["most", "requests", "rows", "long", "too long"],
)
def test_which_passes_fit(requests: list[RequestLayout], fits: bool):
    graphs, _ = graphs_of()
    batch = batch_of(VerifyLayout.of(requests), [0])
    assert graphs.fits(batch) is fits
    graphs.attn_backend.splits = True
    assert graphs.fits(batch) is (fits or requests[0].prefix_len > MAX_CONTEXT)


@pytest.mark.parametrize(
    ("changed", "captured"),
    [
        ({}, [4, 9, 17, 33, 65, 129]),
        ({"environment": "0"}, []),
        ({"environment": None}, [4, 9, 17, 33, 65, 129]),
        ({"environment": None, "backend": "flashinfer"}, []),
        ({"backend": "flashinfer"}, [4, 9, 17, 33, 65, 129]),
        ({"decode_cuda_graph_capture_bs": []}, []),
        ({"lora_manager": object()}, []),
        ({"model_is_mrope": True}, []),
        ({"attention": "LATENT"}, []),
    ],
    ids=[
        *("asked for", "refused", "triton", "flashinfer", "flashinfer, asked for"),
        *("no graphs", "adapters", "mrope", "latent"),
    ],
)
def test_what_is_captured(changed: dict, captured: list[int], monkeypatch: pytest.MonkeyPatch):
    from sglang_parse.attention.support import Attention

    made = []

    class Graphs:
        def __init__(self, _: Any, width: int, max_rows: int) -> None:
            made.append(width)
            assert max_rows == pass_graphs.MAX_ROWS

    monkeypatch.setattr(pass_graphs, "PassGraphs", Graphs)
    attention = Attention[changed.get("attention", "FULL")]
    monkeypatch.setattr(pass_graphs, "attention_of", lambda _: attention)
    monkeypatch.delenv(pass_graphs.ENV_VAR, raising=False)
    if (environment := changed.get("environment", "1")) is not None:
        monkeypatch.setenv(pass_graphs.ENV_VAR, environment)
    config = SimpleNamespace(model_is_mrope=changed.get("model_is_mrope", False))
    runner = SimpleNamespace(
        model_config=config,
        decode_cuda_graph_capture_bs=changed.get("decode_cuda_graph_capture_bs", [1, 2]),
        lora_manager=changed.get("lora_manager"),
        prefill_attention_backend_str=changed.get("backend", "triton"),
    )
    found = pass_graphs.capture(runner, (*pass_graphs.WIDTHS, 4))
    assert len(found) == len(made)
    assert made == captured


@pytest.mark.parametrize("num_steps", [None, 3], ids=["no head", "a head"])
def test_a_heads_proposals_have_a_width_of_their_own(
    num_steps: int | None, monkeypatch: pytest.MonkeyPatch
):
    """Also where the head is the only source: ``--parse-eagle3-path`` alone builds it."""
    from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

    from sglang_parse.core.config import ParseConfig
    from sglang_parse.engine.worker import ParseWorker

    config = ParseConfig(eagle3_path="head" if num_steps else "")
    assert config.uses_eagle3 is bool(num_steps)
    worker = object.__new__(ParseWorker)
    head = SimpleNamespace(
        worker=SimpleNamespace(speculative_num_draft_tokens=1 + (num_steps or 0)),
        init_cuda_graphs=lambda: None,
    )
    target = SimpleNamespace(runner="target's runner")
    worker.engine = SimpleNamespace(
        eagle=head if num_steps else None, verifier=SimpleNamespace(target=target)
    )
    monkeypatch.setattr(BaseSpecWorker, "init_cuda_graphs", lambda _: None)
    monkeypatch.setattr(pass_graphs, "capture", lambda runner, widths: (runner, widths))
    worker.init_cuda_graphs()
    wanted = (*pass_graphs.WIDTHS, 4) if num_steps else pass_graphs.WIDTHS
    assert target.pass_graphs == ("target's runner", wanted)


@pytest.mark.usefixtures("gpu")
def test_passes_replay_the_narrowest_graph_that_fits():
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
