"""On a GPU PARSE's part of a launch waits for nothing, and no tensor lies on the wrong side.

The worker's own code on a GPU without numbers (``fake_gpu``); the models' forwards, attention's
planning in them, and SGLang's sampler are stood in for, because their kernels have no fake form.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.layout import RequestLayout, VerifyLayout
from sglang_parse.core.phases import Action, Phase, RequestPolicy
from sglang_parse.engine.logits.adjust import adjust
from sglang_parse.engine.logits.rows import LogitsRows
from sglang_parse.engine.overlap import can_launch_before_sync
from support import fake_engine
from support.fake_engine import (
    CONFIG,
    PROMPT,
    QUESTION,
    VOCAB,
    WIDTH,
    Runner,
    batch_of,
    engine_for,
    launched,
    request,
)
from support.fake_gpu import GPU, HostWaits

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("gpu")]


def test_what_the_fake_gpu_refuses():
    """The test can fail."""
    values = torch.zeros(3, device=GPU)
    for waits in (
        lambda: torch.tensor([1, 2], device=GPU),
        lambda: values.to("cpu"),
        lambda: values.copy_(torch.zeros(3)),
        lambda: values[[0, 2]],
        lambda: values.__setitem__(torch.zeros(1, dtype=torch.int64, device=GPU), 1.0),
    ):
        with pytest.raises(HostWaits):
            waits()
    for looks in (values.tolist, values.nonzero, lambda: bool(values.any())):
        with pytest.raises(RuntimeError):
            looks()
    with pytest.raises(RuntimeError, match="device"):
        values + torch.zeros(3)


def test_adjusted_logits():
    req = request(0, Phase.DRAFTING, Action.DRAFT)
    params = req.sampling_params
    params.min_new_tokens, params.stop_token_ids = 5, {9}
    params.repetition_penalty, params.logit_bias = 1.3, {"7": -4.0}
    adjust(torch.zeros(4, VOCAB, device=GPU), [LogitsRows(req, 0, 4, [4], [5, 7, 5])])


def test_a_chunk():
    """Requests that begin, go on, need their draft KV completed, sample, or end before the rest."""
    begins, goes_on = (request(i, Phase.DRAFTING, Action.DRAFT, draft=2 * i) for i in (0, 1))
    samples = request(2, Phase.DRAFTING, Action.DRAFT, top_k=5)
    ends = request(3, Phase.DRAFTING, Action.DRAFT, draft=7)
    goes_on.parse_state.draft_kv_len = PROMPT + 3
    ends.parse_state.draft_kv_len = PROMPT + 8
    iteration, engine = launched(batch_of(begins, goes_on, samples, ends))
    modes = [forward.forward_mode.name for forward in engine.drafter.model.draft_runner.forwards]
    assert modes == ["DECODE"] * CONFIG.draft_chunk
    assert iteration.result.can_run_cuda_graph
    for req in (begins, samples):
        req.parse_state.num_draft_inflight = 0
    begins.parse_state.draft_kv_len = PROMPT - 4
    _, engine = launched(batch_of(begins, samples))
    modes = [forward.forward_mode.name for forward in engine.drafter.model.draft_runner.forwards]
    assert modes == ["EXTEND"] + ["DECODE"] * (CONFIG.draft_chunk - 1)


@pytest.mark.parametrize("is_masked", [True, False], ids=["mask", "alias"])
@pytest.mark.parametrize("masks", ["every", "last"])
def test_a_block(monkeypatch: pytest.MonkeyPatch, masks: str, is_masked: bool):
    """The first of a chunk: one draft lacks KV of a token, and its rows are those of the others."""
    begins = request(0, Phase.DRAFTING, Action.DRAFT)
    goes_on = request(1, Phase.DRAFTING, Action.DRAFT, draft=2)
    goes_on.parse_state.draft_kv_len = PROMPT + 1
    goes_on.parse_state.draft.candidates = (7, 8, 9)
    samples = request(2, Phase.DRAFTING, Action.DRAFT, top_k=5)
    ends = request(3, Phase.DRAFTING, Action.DRAFT, draft=7)
    ends.parse_state.draft_kv_len = PROMPT + 7
    ends.parse_state.draft.candidates = (7, 8, 9)
    batch = batch_of(begins, goes_on, samples, ends)
    engine = engine_for(batch, is_masked=is_masked, block_size=4)
    (plan,) = (plan for plan in engine.controller.blocks.costs if plan.masks.value == masks)
    monkeypatch.setattr(engine.controller.blocks, "choose", lambda *_: plan)
    launched(batch, engine)
    (forward,) = engine.drafter.model.draft_runner.forwards
    num_rows = {"last": 7, "every": 16}[masks]
    assert [layout.num_rows for layout in forward.spec_info.layout.requests] == [num_rows] * 4
    mask = forward.spec_info.custom_mask
    assert (mask is not None) == (is_masked and masks == "every")


@pytest.mark.parametrize("is_masked", [True, False], ids=["mask", "alias"])
@pytest.mark.parametrize("masks", ["every", "last"])
@pytest.mark.parametrize("seeds", [False, True], ids=["", "seeded"])
def test_blocks_after_blocks_in_flight(
    monkeypatch: pytest.MonkeyPatch, masks: str, is_masked: bool, seeds: bool
):
    """Nothing waits within a chunk, nor between two; all have the same rows, wherever they are."""
    reqs = [
        request(0, Phase.DRAFTING, Action.DRAFT, allocated=WIDTH),
        request(1, Phase.DRAFTING, Action.DRAFT, draft=2, top_k=5, allocated=WIDTH),
    ]
    reqs[1].parse_state.draft_kv_len = PROMPT + 2
    for req in reqs:
        req.sampling_params.max_new_tokens = 1000
    batch = batch_of(*reqs)
    if seeds:
        batch.sampling_info.sampling_seed = torch.zeros(2, dtype=torch.int64, device=GPU)
    config = ParseConfig(draft_tokens=64, draft_chunk=5)  # two of a block's four are expected
    engine = engine_for(batch, is_masked=is_masked, block_size=4, config=config)
    (plan,) = (plan for plan in engine.controller.blocks.costs if plan.masks.value == masks)
    monkeypatch.setattr(engine.controller.blocks, "choose", lambda *_: plan)
    engine.schedule.all_take = lambda *_: True
    first, _ = launched(batch, engine)
    assert [req.parse_state.num_draft_inflight for req in reqs] == [12, 12]
    monkeypatch.setattr(first.chunk, "wait", lambda **_: None)  # it has no numbers
    assert can_launch_before_sync(first, reqs[1:])
    behind = batch_of(*reqs[1:])
    behind.sampling_info.sampling_seed = None
    second, _ = launched(behind, engine, first)
    assert second.chunk.kind is first.chunk.kind is plan
    _, *forwards = engine.drafter.model.draft_runner.forwards
    width = {"last": 7, "every": 16}[masks]
    for number, forward in enumerate(forwards, 1):
        num_reqs = 2 if number < 3 else 1
        layout, mask = forward.spec_info.layout, forward.spec_info.custom_mask
        assert [part.num_rows for part in layout.requests] == [width] * num_reqs
        assert len(forward.input_ids) == len(forward.out_cache_loc) == width * num_reqs
        # The longest they can be behind three tokens more for each block.
        bounds = [PROMPT + 4 * number, PROMPT + 2 + 4 * number][-num_reqs:]
        assert [part.prefix_len for part in layout.requests] == bounds
        assert forward.extend_prefix_lens_cpu == bounds
        assert (mask is not None) == (is_masked and masks == "every")
    assert len(forwards) == 5


@pytest.mark.parametrize(("masks", "width"), [("every", 16), ("last", 7)])
def test_blocks_behind_the_end_of_a_draft_stay_in_its_slots(
    masks: str, width: int, monkeypatch: pytest.MonkeyPatch
):
    """One token per block is expected, and each may bring four: the draft is over then."""
    req = request(0, Phase.DRAFTING, Action.DRAFT, allocated=PROMPT + 12 + width)
    req.sampling_params.max_new_tokens = 1000
    batch, config = batch_of(req), ParseConfig(draft_tokens=12, draft_chunk=12)
    engine = engine_for(batch, block_size=4, config=config)
    costs = engine.controller.blocks.costs
    (plan,) = (plan for plan in costs if plan.masks.value == masks)
    costs[plan].num_tokens = costs[plan].num_used = 1.0
    monkeypatch.setattr(engine.controller.blocks, "choose", lambda *_: plan)
    launched(batch, engine)
    starts = [f.extend_prefix_lens_cpu for f in engine.drafter.model.draft_runner.forwards]
    assert starts == [[PROMPT + min(4 * number, 12)] for number in range(12)]


def test_blocks_where_attention_plans_on_the_host():
    """Each is read before the next is launched; so is a chunk before the next one."""
    req = request(0, Phase.DRAFTING, Action.DRAFT, allocated=WIDTH)
    req.sampling_params.max_new_tokens = 1000
    batch = batch_of(req)
    config = ParseConfig(draft_tokens=64, draft_chunk=4)
    engine = engine_for(batch, block_size=4, config=config, plans_on_device=False)
    first, _ = launched(batch, engine)
    assert len(engine.drafter.model.draft_runner.forwards) == 1
    assert not first.chunk.can_follow([req])


def test_steps_after_steps_in_flight():
    reqs = [request(i, Phase.PLAIN, Action.DECODE, top_k=1 + 4 * i) for i in range(3)]
    batch = batch_of(*reqs)
    first, engine = launched(batch)
    assert can_launch_before_sync(first, reqs[1:])
    assert first.result.can_run_cuda_graph
    launched(batch_of(*reqs[1:]), engine, first)
    assert [len(forward.seq_lens) for forward in engine.verifier.target.runner.forwards] == [3, 2]
    assert [req.parse_state.num_inflight for req in reqs] == [1, 2, 2]


@pytest.mark.parametrize("is_masked", [True, False], ids=["mask", "alias"])
@pytest.mark.parametrize("question", [QUESTION, None], ids=["semantic", "token"])
def test_a_pass(is_masked: bool, question: Any, monkeypatch: pytest.MonkeyPatch):
    """Drafts are judged, one request samples; one only continues, one does so with an adapter, and
    one has a head's proposals checked."""
    batch = batch_of(
        request(0, Phase.VERIFYING, Action.VERIFY, draft=5),
        request(1, Phase.VERIFYING, Action.VERIFY, draft=1, top_k=5),
        request(2, Phase.DECODING, Action.DECODE),
        request(3, Phase.PLAIN, Action.DECODE),
        request(4, Phase.DECODING, Action.PROPOSE),
    )
    batch.reqs[3].lora_id = "adapter"
    if question is None:
        for req in batch.reqs:
            req.parse_state.ask([], [])
    engine = engine_for(batch, is_masked=is_masked, question=question)
    eagle = SimpleNamespace(propose=lambda *_: [[8, 9]])
    monkeypatch.setattr(engine, "eagle", eagle)
    iteration, _ = launched(batch, engine)
    assert not iteration.result.can_run_cuda_graph
    (forward,) = engine.verifier.target.runner.forwards
    assert forward.lora_ids == [None] * 4 + ["adapter"]
    layout = forward.spec_info.layout
    assert len(forward.input_ids) == len(forward.positions) == layout.num_rows
    mask = forward.spec_info.custom_mask
    assert mask.device == GPU if is_masked and question else mask is None


def test_the_logits_of_many_drafts_never_lie_side_by_side(monkeypatch: pytest.MonkeyPatch):
    """Token mode wants logits of every row: 64 drafts of 256 tokens, a vocabulary of 152,000."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    from sglang_parse.engine import forward as forwards

    vocab, num_reqs, draft = 152_000, 64, 256
    monkeypatch.setattr(fake_engine, "WIDTH", 400)
    monkeypatch.setattr(forwards, "max_forward_rows", lambda: 8192)
    batch = batch_of(
        *(request(i, Phase.VERIFYING, Action.VERIFY, draft=draft) for i in range(num_reqs)),
        request(num_reqs, Phase.DECODING, Action.DECODE),
    )
    for req in batch.reqs[:num_reqs]:
        req.parse_state.ask([], [])
    engine = engine_for(batch, question=None)
    runner = engine.verifier.target.runner
    made: list[weakref.ref] = []
    rows: list[int] = []

    def forward(forward_batch: Any) -> Any:
        assert not any(logits() is not None for logits in made)
        rows.append(len(forward_batch.spec_info.select_index))
        logits = torch.zeros(rows[-1], vocab, device=GPU)
        assert logits.nbytes <= forwards.MAX_LOGITS_BYTES == 2**30
        made.append(weakref.ref(logits))
        output = LogitsProcessorOutput(next_token_logits=logits, hidden_states=None)
        return SimpleNamespace(logits_output=output, can_run_graph=False)

    monkeypatch.setattr(runner, "forward", forward, raising=False)
    runner.model_config = SimpleNamespace(**vars(runner.model_config) | {"vocab_size": vocab})
    launched(batch, engine)
    per_pass = 6 * (1 + draft)
    assert rows == [per_pass] * 10 + [num_reqs * (1 + draft) + 1 - 10 * per_pass]
    assert not any(logits() is not None for logits in made)


def test_the_lengths_of_a_batch_under_overlap():
    from sglang_parse.engine.overlap import NoOpFutureMap

    batch = batch_of(*(request(i, Phase.PLAIN, Action.DECODE) for i in range(2)))
    batch.forward_mode = SimpleNamespace(is_extend=lambda: False)
    NoOpFutureMap.resolve_seq_lens_cpu(object.__new__(NoOpFutureMap), batch)
    assert batch.seq_lens.device == GPU
    assert batch.seq_lens_cpu.device.type == "cpu"


LAYOUT = VerifyLayout.of(
    [RequestLayout(9, 6, (2, 6), (3, 4)), RequestLayout(0, 4, (4,), (2,)), RequestLayout(7, 1)]
)


def test_how_a_backend_plans_a_pass():
    """With a mask: index arrays; without: pseudo-sequences, as slots in a row or as a table."""
    from sglang_parse.attention.alias import page_table, paged_rows
    from sglang_parse.attention.spec_input import ParseVerifyInput
    from sglang_parse.core.mask import flat_mask

    spec_info = ParseVerifyInput(
        layout=LAYOUT,
        custom_mask=flat_mask(LAYOUT, GPU),
        select_index=torch.zeros(1, dtype=torch.int64, device=GPU),
    )
    lens = torch.zeros(3, dtype=torch.int64, device=GPU)
    planned = spec_info.generate_attn_arg_prefill(
        req_pool_indices=lens,
        paged_kernel_lens=lens,
        paged_kernel_lens_sum=LAYOUT.kv_indptr[-1],
        translator=SimpleNamespace(pack_read_stream=lambda *_, **__: None),
        plan=None,
        kind=None,
    )
    slots = torch.zeros(3, WIDTH, dtype=torch.int32, device=GPU)
    sequences = LAYOUT.pseudo_sequences()
    for with_own in (True, False):
        *rows, _ = paged_rows(sequences, slots, with_own=with_own)
        assert all(part.device == GPU for part in rows)
    for part in (*planned, page_table(sequences, slots)):
        assert part.device == GPU


def test_flashinfer_plans_pseudo_sequences_from_the_host():
    """What its plan looks at lies there, or it would wait for the device."""
    from sglang_parse.attention.flashinfer import ParseFlashInferBackend
    from sglang_parse.attention.spec_input import ParseVerifyInput

    plans = []

    def begin_forward(*told: Any, **_: Any) -> None:
        plans.append(told)
        looked_at = (told[0], told[1], told[3])
        assert [len(part) for part in looked_at] == [7, 7, 6]
        for part in looked_at:
            assert part.device.type == "cpu"
        assert told[2].device == GPU

    backend = object.__new__(ParseFlashInferBackend)
    table = torch.zeros(3, WIDTH, dtype=torch.int32, device=GPU)
    updater = SimpleNamespace(num_qo_heads=8, num_kv_heads=1, head_dim=128)
    updater.q_data_type = updater.data_type = torch.bfloat16
    vars(backend).update(
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        prefill_wrappers_verify=[SimpleNamespace(begin_forward=begin_forward)],
        prefill_split_tile_size=None,
        num_wrappers=1,
        indices_updater_prefill=updater,
    )
    spec_info = ParseVerifyInput(
        layout=LAYOUT,
        custom_mask=None,
        select_index=torch.zeros(1, dtype=torch.int64, device=GPU),
    )
    requests = torch.zeros(3, dtype=torch.int64, device=GPU)
    backend._plan(SimpleNamespace(spec_info=spec_info, req_pool_indices=requests))
    assert len(plans) == 1


CHAIN = 3


@pytest.mark.parametrize(
    ("num_rows", "action", "mode"),
    [
        ((2, 1), Action.VERIFY, "EXTEND"),
        ((CHAIN, CHAIN), Action.VERIFY, "DRAFT_EXTEND_V2"),
        ((CHAIN, CHAIN - 1), Action.VERIFY, "EXTEND"),
        ((CHAIN, CHAIN - 1), Action.PROPOSE, "DRAFT_EXTEND_V2"),
    ],
    ids=["runs", "chains", "a chain and a run", "a shorter proposal"],
)
def test_a_head_follows_what_was_written(
    monkeypatch: pytest.MonkeyPatch, num_rows: tuple[int, int], action: Action, mode: str
):
    """SGLang's EAGLE-3 worker extends the head's KV; the host goes on meanwhile. Proposals have one
    shape, which SGLang has a CUDA graph for."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.speculative import eagle_worker_v2
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_parse.engine.eagle import EagleDecoder
    from sglang_parse.engine.faults import DraftGuard

    class HeadRunner(Runner):
        canary_manager = None

        def forward(self, forward_batch: Any) -> Any:
            result = super().forward(forward_batch)
            output, (num_tokens,) = result.logits_output, forward_batch.input_ids.shape
            assert len(forward_batch.out_cache_loc) == num_tokens
            kept = num_tokens if mode == "DRAFT_EXTEND_V2" else len(forward_batch.seq_lens)
            output.next_token_logits = torch.zeros(kept, VOCAB, device=GPU)
            output.hidden_states = torch.zeros(kept, 16, device=GPU)
            return result

    settings = SimpleNamespace(speculative_use_rejection_sampling=False)
    monkeypatch.setattr(eagle_worker_v2, "get_spec", lambda: settings)
    monkeypatch.setattr(EagleDecoder, "forward_contexts", lambda _: nullcontext())
    prepare = eagle_worker_v2.prepare_for_draft_extend

    def prepare_with_lengths(extend_input: Any, view: Any, *args: Any, **kwargs: Any) -> Any:
        # SGLang reads the host's lengths, which have no values here.
        view.seq_lens_cpu = np.array([req.parse_state.committed_len for req in view.reqs])
        return prepare(extend_input, view, *args, **kwargs)

    monkeypatch.setattr(eagle_worker_v2, "prepare_for_draft_extend", prepare_with_lengths)
    batch = batch_of(*(request(i, Phase.DECODING, Action.PROPOSE) for i in range(3)))
    batch.model_config = Runner.model_config
    batch.forward_mode = ForwardMode.DECODE
    head, worker = (
        object.__new__(kind) for kind in (EagleDecoder, eagle_worker_v2.EagleDraftWorker)
    )
    head.worker, head._guard = worker, DraftGuard(2)  # contains nothing
    head.columns, head.num_steps, head.name = None, CHAIN - 1, "the head"
    head.num_run = head.num_steps
    head.algorithm = SpeculativeAlgorithm.EAGLE3
    runner = HeadRunner(batch.req_to_token_pool.req_to_token)
    runner.attn_backend = SimpleNamespace(init_forward_metadata=lambda _: None)
    runner.spec_algorithm = SpeculativeAlgorithm.EAGLE3
    vars(worker).update(
        draft_worker=None,
        draft_runner=runner,
        topk=1,
        speculative_algorithm=SpeculativeAlgorithm.EAGLE3,
        speculative_num_draft_tokens=CHAIN,
        cuda_graph_runner_for_draft_extend=None,
        plan_stream=None,
        plan_stream_ctx=nullcontext(),
        device=GPU,
        seed_dsa_topk_from_draft_extend=False,
    )
    for req in batch.reqs:
        req.parse_state.policy = RequestPolicy(threshold=0.5, proposer="eagle3", uses_eagle=True)
    hidden, middle = torch.zeros(sum(num_rows), 48, device=GPU), num_rows[0]
    part = SimpleNamespace(action=action)
    results = [
        SimpleNamespace(index=0, part=part, hidden=hidden[:middle]),
        SimpleNamespace(index=2, part=part, hidden=hidden[middle:]),
    ]
    emitted = [(5, 6), (), (7,)]
    for req, tokens in zip(batch.reqs, emitted, strict=True):
        req.parse_state.write(tokens)
    head.draft_extend(batch, results, emitted)
    assert [forward.forward_mode.name for forward in runner.forwards] == [mode]
    first, untouched, last = (req.parse_state.notes.eagle for req in batch.reqs)
    assert untouched is None
    for state in (first, last):
        parts = (state.topk_p, state.topk_index, state.hidden_states)
        assert {part.device for part in parts} == {GPU}
        assert (len(state.topk_index), state.hidden_states.shape) == (1, (1, 16))
