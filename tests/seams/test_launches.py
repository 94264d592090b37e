"""On a GPU PARSE's part of a launch waits for nothing, and no tensor lies on the wrong side.

The worker's own code on a GPU without numbers (``fake_gpu``); the models' forwards, attention's
planning in them, and SGLang's sampler are stood in for, because their kernels have no fake form.
"""

from __future__ import annotations

import sys
import weakref
from array import array
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.layout import RequestLayout, VerifyLayout
from sglang_parse.core.phases import Move, Phase, Questions, Terms
from sglang_parse.core.request import Draft, RequestState
from support.fake_gpu import GPU, HostWaits, fake_gpu

pytestmark = pytest.mark.seams

VOCAB, WIDTH, PROMPT = 32, 64, 20
CONFIG = ParseConfig(draft_tokens=8, burst_tokens=4)
QUESTION = SimpleNamespace(accept_id=3, reject_id=4)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What asks for a driver, as it behaves where there is one."""
    from sglang.kernels.ops.memory import small_copy
    from sglang.srt.model_executor import forward_batch_info
    from sglang.srt.runtime_context import get_parallel

    from sglang_parse import device
    from sglang_parse.engine import ranks, readout, verify

    def async_h2d(values: list, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    def async_d2h(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cpu", non_blocking=True)

    def compute_position(_backend: str, _prefixes: Any, lens: torch.Tensor, num: int) -> tuple:
        """A kernel's; a pass has its own."""
        return torch.zeros(num, dtype=torch.int64, device=GPU), torch.zeros_like(lens)

    class Event:
        record = synchronize = staticmethod(lambda *_: None)

    monkeypatch.setattr(device, "async_h2d", async_h2d)
    monkeypatch.setattr(device, "async_d2h", async_d2h)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(readout, "share", lambda values: values)
    monkeypatch.setattr(ranks, "share", lambda values: values)
    monkeypatch.setattr(verify, "max_pass_rows", lambda: 1024)
    nothing = forward_batch_info.CaptureHiddenMode.NULL
    mode = "get_server_return_hidden_states_mode"
    monkeypatch.setattr(forward_batch_info, mode, lambda: nothing)
    monkeypatch.setattr(forward_batch_info, "compute_position", compute_position)
    # A kernel too; SGLang copies without it where it does not fit.
    monkeypatch.setattr(small_copy, "try_small_copy", lambda *_: False)
    one_rank = dict.fromkeys(("moe_ep_size", "attn_dcp_size", "attn_dp_size", "attn_cp_size"), 1)
    with get_parallel().override(**one_rank), fake_gpu():
        yield


class Runner:
    """A model runner whose forward gives logits of the right shape."""

    device = GPU
    spec_algorithm = lora_manager = None
    is_draft_worker = False
    model_config = SimpleNamespace(
        model_is_mrope=False, requires_mm_token_modalities=False, vocab_size=VOCAB
    )
    ngram_embedding_manager = SimpleNamespace(enabled=False)
    prefill_attention_backend_str = ""

    def __init__(self, table: torch.Tensor) -> None:
        from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

        self.forwards: list[Any] = []
        self.kv_index_translator = KVIndexTranslator(
            req_to_token=table,
            token_to_kv_pool_allocator=None,
            token_to_kv_pool=None,
            page_size=1,
            device=GPU,
        )

    def forward(self, forward_batch: Any) -> Any:
        from sglang_parse.attention.spec_input import ParseVerifyInput

        self.forwards.append(forward_batch)
        spec_info = forward_batch.spec_info
        num_rows = len(forward_batch.seq_lens)
        if isinstance(spec_info, ParseVerifyInput):
            num_rows = len(spec_info.select_index)
        for name in ("input_ids", "positions", "out_cache_loc", "seq_lens", "req_pool_indices"):
            assert getattr(forward_batch, name).device == GPU, name
        if forward_batch.forward_mode.is_decode():
            self._load_graph(forward_batch)
        logits = torch.zeros(num_rows, VOCAB, device=GPU)
        return SimpleNamespace(
            logits_output=SimpleNamespace(next_token_logits=logits, hidden_states=None),
            can_run_graph=forward_batch.forward_mode.is_decode(),
        )

    def _load_graph(self, forward_batch: Any) -> None:
        """What SGLang does before it replays the CUDA graph of a step."""
        from sglang.srt.model_executor.cuda_graph_buffer_registry import build_decode_registry

        num_reqs, captured = len(forward_batch.seq_lens), 8
        registry = build_decode_registry(
            device=GPU,
            max_bs=captured,
            max_num_token=captured,
            seq_len_fill_value=1,
            cache_loc_dtype=torch.int64,
            share_pool=False,
        )
        registry.fill_from(
            forward_batch,
            raw_bs=num_reqs,
            padded_bs=captured,
            raw_num_tokens=num_reqs,
            padded_num_tokens=captured,
        )

    def sample(self, output: Any, view: Any) -> torch.Tensor:
        for tensor in (view.positions, view.sampling_info.temperatures, view.req_pool_indices):
            assert len(tensor) == len(output.next_token_logits)
            assert tensor.device == GPU
        return output.next_token_logits.argmax(-1).to(torch.int32)


def request(number: int, phase: Phase, move: Move, *, top_k: int = 1, draft: int = 0) -> Any:
    """A running request behind a prompt and one output token."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    questions = {"prefix_ends": [draft], "question_ids": [[1, 2]]} if move is Move.PASS else {}
    params = SamplingParams(top_k=top_k, max_new_tokens=30, ignore_eos=True)
    req = Req(str(number), "", array("q", [1] * PROMPT), params, vocab_size=VOCAB)
    req.kv.req_pool_idx, req.kv.kv_allocated_len = number, PROMPT + 8
    req.parse_state = RequestState(
        Terms(threshold=0.5),
        phase=phase,
        move=move,
        output_ids=[7],
        committed=PROMPT,
        draft_kv_len=PROMPT,
        draft=Draft(token_ids=[5] * draft, **questions),
    )
    return req


def batch_of(*reqs: Any) -> Any:
    """SGLang's batch of these requests."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    def column(value: float) -> torch.Tensor:
        return torch.full((len(reqs),), value, device=GPU)

    info = SamplingBatchInfo(
        temperatures=column(1.0),
        top_ps=column(1.0),
        top_ks=column(1),
        min_ps=column(0.0),
        is_all_greedy=False,
        is_any_greedy=True,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=False,
        vocab_size=VOCAB,
        device=GPU,
    )
    table = torch.zeros(len(reqs), WIDTH, dtype=torch.int32, device=GPU)
    return ScheduleBatch(
        reqs=list(reqs),
        device=GPU,
        req_pool_indices=torch.arange(len(reqs), device=GPU),
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        sampling_info=info,
        return_logprob=False,
    )


def engine_for(batch: Any, *, is_masked: bool = True, question: Any = QUESTION) -> Any:
    """What a server's iterations work with, over runners that compute nothing."""
    from sglang_parse.engine.draft import DraftModel
    from sglang_parse.engine.faults import DraftGuard
    from sglang_parse.engine.head import GuardedHead
    from sglang_parse.engine.iteration import Engine
    from sglang_parse.engine.target import PlainTarget
    from sglang_parse.engine.verify import Verifier

    table = batch.req_to_token_pool.req_to_token
    target, draft = object.__new__(PlainTarget), object.__new__(DraftModel)
    vars(target).update(runner=Runner(table), _capture_mode=None)
    vars(draft).update(
        draft_runner=Runner(table), device=GPU, steps_unseen=None, req_to_token=table
    )
    return Engine(
        config=CONFIG,
        target=target,
        draft=draft,
        draft_guard=DraftGuard(1),
        head=GuardedHead(None, 1),
        verifier=Verifier(target, question, is_masked=is_masked, capture=False),
        rounds=SimpleNamespace(questions=lambda _: None),
        slots=SimpleNamespace(),
        switch=SimpleNamespace(),
        tally=SimpleNamespace(count=lambda *_: None),
        certified=SimpleNamespace(),
    )


def launched(batch: Any, engine: Any = None, before: Any = None) -> tuple[Any, Any]:
    """An iteration of ``batch``, launched and not read; and what it worked with."""
    from sglang_parse.engine.iteration import Iteration

    engine = engine or engine_for(batch)
    iteration = Iteration(engine, batch)
    iteration.launch(before)
    return iteration, engine


def test_what_the_fake_gpu_refuses():
    """The test can fail."""
    values = torch.zeros(3, device=GPU)
    for waits in (
        lambda: torch.tensor([1, 2], device=GPU),
        lambda: values.to("cpu"),
        lambda: values.copy_(torch.zeros(3)),
        lambda: values[[0, 2]],
    ):
        with pytest.raises(HostWaits):
            waits()
    for looks in (values.tolist, values.nonzero, lambda: bool(values.any())):
        with pytest.raises(RuntimeError):
            looks()
    with pytest.raises(RuntimeError, match="device"):
        values + torch.zeros(3)


def test_a_burst():
    """Requests that begin, go on, need their draft KV completed, sample, or end before the rest."""
    begins, goes_on = (request(i, Phase.DRAFTING, Move.BURST, draft=2 * i) for i in (0, 1))
    samples = request(2, Phase.DRAFTING, Move.BURST, top_k=5)
    ends = request(3, Phase.DRAFTING, Move.BURST, draft=7)
    goes_on.parse_state.draft_kv_len = PROMPT + 3
    ends.parse_state.draft_kv_len = PROMPT + 8
    iteration, engine = launched(batch_of(begins, goes_on, samples, ends))
    modes = [forward.forward_mode.name for forward in engine.draft.draft_runner.forwards]
    assert modes == ["DECODE"] * CONFIG.burst_tokens
    assert iteration.result.can_run_cuda_graph
    begins.parse_state.draft_kv_len = PROMPT - 4
    _, engine = launched(batch_of(begins, samples))
    modes = [forward.forward_mode.name for forward in engine.draft.draft_runner.forwards]
    assert modes == ["EXTEND"] + ["DECODE"] * (CONFIG.burst_tokens - 1)


def test_steps_behind_unread_steps():
    reqs = [request(i, Phase.PLAIN, Move.STEP, top_k=1 + 4 * i) for i in range(3)]
    batch = batch_of(*reqs)
    first, engine = launched(batch)
    assert first.may_be_followed_unread(reqs[1:])
    assert first.result.can_run_cuda_graph
    launched(batch_of(*reqs[1:]), engine, first)
    assert [len(forward.seq_lens) for forward in engine.target.runner.forwards] == [3, 2]
    assert [req.parse_state.num_unread for req in reqs] == [1, 2, 2]


@pytest.mark.parametrize("is_masked", [True, False], ids=["mask", "alias"])
@pytest.mark.parametrize("question", [QUESTION, None], ids=["semantic", "token"])
def test_a_pass(is_masked: bool, question: Any, monkeypatch: pytest.MonkeyPatch):
    """Drafts are judged, one request samples; one only continues, one does so with an adapter, and
    one has a head's proposals checked."""
    batch = batch_of(
        request(0, Phase.VERIFYING, Move.PASS, draft=5),
        request(1, Phase.VERIFYING, Move.PASS, draft=1, top_k=5),
        request(2, Phase.CONTINUING, Move.STEP),
        request(3, Phase.PLAIN, Move.STEP),
        request(4, Phase.CONTINUING, Move.EAGLE),
    )
    batch.reqs[3].lora_id = "adapter"
    if question is None:
        for req in batch.reqs:
            req.parse_state.ask(Questions([], []))
    engine = engine_for(batch, is_masked=is_masked, question=question)
    monkeypatch.setattr(engine.head, "propose", lambda *_: {4: [8, 9]})
    iteration, _ = launched(batch, engine)
    assert not iteration.result.can_run_cuda_graph
    forward, alone = engine.target.runner.forwards
    assert (len(forward.seq_lens), len(alone.seq_lens)) == (4, 1)
    layout = forward.spec_info.layout
    assert len(forward.input_ids) == len(forward.positions) == layout.num_rows
    mask = forward.spec_info.custom_mask
    assert mask.device == GPU if is_masked else mask is None


def test_the_logits_of_many_drafts_never_lie_side_by_side(monkeypatch: pytest.MonkeyPatch):
    """Token mode wants logits of every row: 64 drafts of 256 tokens, a vocabulary of 152,000."""
    from sglang_parse.engine import verify

    vocab, num_reqs, draft = 152_000, 64, 256
    monkeypatch.setattr(sys.modules[__name__], "WIDTH", 400)
    monkeypatch.setattr(verify, "max_pass_rows", lambda: 8192)
    batch = batch_of(
        *(request(i, Phase.VERIFYING, Move.PASS, draft=draft) for i in range(num_reqs)),
        request(num_reqs, Phase.CONTINUING, Move.STEP),
    )
    for req in batch.reqs[:num_reqs]:
        req.parse_state.ask(Questions([], []))
    engine = engine_for(batch, question=None)
    runner = engine.target.runner
    made: list[weakref.ref] = []
    rows: list[int] = []

    def forward(forward_batch: Any) -> Any:
        assert not any(logits() is not None for logits in made)
        rows.append(len(forward_batch.spec_info.select_index))
        logits = torch.zeros(rows[-1], vocab, device=GPU)
        assert logits.nbytes <= verify.MAX_LOGITS_BYTES == 2**30
        made.append(weakref.ref(logits))
        output = SimpleNamespace(next_token_logits=logits, hidden_states=None)
        return SimpleNamespace(logits_output=output, can_run_graph=False)

    monkeypatch.setattr(runner, "forward", forward, raising=False)
    runner.model_config = SimpleNamespace(**vars(runner.model_config) | {"vocab_size": vocab})
    launched(batch, engine)
    per_pass = 6 * (1 + draft)
    assert rows == [per_pass] * 10 + [num_reqs * (1 + draft) + 1 - 10 * per_pass]
    assert not any(logits() is not None for logits in made)


def test_only_a_pass_is_prepared_without_adapters(monkeypatch: pytest.MonkeyPatch):
    """A graph captured, or a step prepared, in that state would leave out an adapter it needs."""
    from sglang.srt.model_executor import forward_batch_info

    overlapped = SimpleNamespace(enable_lora_overlap_loading=True)
    monkeypatch.setattr(forward_batch_info, "get_lora", lambda: overlapped)
    backend = SimpleNamespace(skip_inactive_lora_batches=False)
    prepared = []

    def prepare(forward_batch: Any) -> None:
        is_step = forward_batch.forward_mode.is_decode()
        prepared.append((is_step, backend.skip_inactive_lora_batches))

    batch = batch_of(
        request(0, Phase.VERIFYING, Move.PASS, draft=5), request(1, Phase.PLAIN, Move.STEP)
    )
    batch.reqs[1].lora_id = "adapter"
    engine = engine_for(batch)
    engine.target.runner.lora_manager = SimpleNamespace(
        lora_backend=backend, prepare_lora_batch=prepare, attn_dp_enabled=False
    )
    launched(batch, engine)
    assert prepared == [(False, True), (True, False)]
    assert not backend.skip_inactive_lora_batches


def test_the_lengths_of_a_batch_under_overlap():
    from sglang_parse.engine.overlap import HostRelay

    batch = batch_of(*(request(i, Phase.PLAIN, Move.STEP) for i in range(2)))
    batch.forward_mode = SimpleNamespace(is_extend=lambda: False)
    HostRelay.resolve_seq_lens_cpu(object.__new__(HostRelay), batch)
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

    def begin_forward(*told: Any, **_: Any) -> None:
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
        indices_updater_prefill=updater,
    )
    spec_info = ParseVerifyInput(
        layout=LAYOUT,
        custom_mask=None,
        select_index=torch.zeros(1, dtype=torch.int64, device=GPU),
    )
    requests = torch.zeros(3, dtype=torch.int64, device=GPU)
    backend._plan(SimpleNamespace(spec_info=spec_info, req_pool_indices=requests))


def test_a_head_follows_what_was_written(monkeypatch: pytest.MonkeyPatch):
    """SGLang's EAGLE-3 worker extends the head's KV; the host goes on meanwhile."""
    from sglang.srt.speculative import eagle_worker_v2
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_parse.engine.head import Eagle3Head, Written

    class HeadRunner(Runner):
        canary_manager = None

        def forward(self, forward_batch: Any) -> Any:
            result = super().forward(forward_batch)
            num_reqs = len(forward_batch.seq_lens)
            result.logits_output.hidden_states = torch.zeros(num_reqs, 16, device=GPU)
            return result

    settings = SimpleNamespace(speculative_use_rejection_sampling=False)
    monkeypatch.setattr(eagle_worker_v2, "get_spec", lambda: settings)
    monkeypatch.setattr(Eagle3Head, "_forward", lambda _: nullcontext())
    batch = batch_of(*(request(i, Phase.CONTINUING, Move.EAGLE) for i in range(3)))
    head, worker = (object.__new__(kind) for kind in (Eagle3Head, eagle_worker_v2.EagleDraftWorker))
    head.worker = worker
    vars(worker).update(
        draft_worker=None,
        draft_runner=HeadRunner(batch.req_to_token_pool.req_to_token),
        topk=1,
        speculative_algorithm=SpeculativeAlgorithm.EAGLE3,
        seed_dsa_topk_from_draft_extend=False,
    )
    for req in batch.reqs:
        req.parse_state.terms = Terms(threshold=0.5, continuation="eagle3")
    states = torch.zeros(3, 48, device=GPU)
    head.follow(batch, [Written(0, [5, 6], states[:2]), Written(2, [7], states[2:])])
    first, untouched, last = (req.parse_state.head for req in batch.reqs)
    assert untouched is None
    for state in (first, last):
        assert {part.device for part in (state.topk_p, state.topk_index, state.hidden)} == {GPU}
