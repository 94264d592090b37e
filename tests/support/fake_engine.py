"""PARSE's engine on a GPU without numbers (``fake_gpu``): the worker's own code over models that
compute nothing.

The models' forwards, attention's planning in them, and SGLang's sampler are stood in for, because
their kernels have no fake form.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_parse.attention.support import ALIAS, MASK
from sglang_parse.core.block import block_kinds
from sglang_parse.core.config import ParseConfig
from sglang_parse.core.phases import Action, Draft, Phase, RequestPolicy
from sglang_parse.core.policy.controller import Controller
from sglang_parse.core.request import RequestState
from support.engine_parts import engine_parts
from support.fake_gpu import GPU, fake_gpu

VOCAB, WIDTH, PROMPT = 32, 64, 20
CONFIG = ParseConfig(draft_tokens=8, draft_chunk=4)
CHUNK, SIZE, BLOCKS = 16, 8, 4
DRAFTED = 5
"""Every number that arrives."""
QUESTION = SimpleNamespace(accept_id=3, reject_id=4, max_len=2)


@contextmanager
def engine_on_a_fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU without numbers, and what asks for a driver as it behaves where there is one."""
    from sglang.kernels.ops.memory import small_copy
    from sglang.srt.model_executor import forward_batch_info
    from sglang.srt.runtime_context import get_parallel

    from sglang_parse import device
    from sglang_parse.engine import broadcast, eagle, forward, parts, prefill, target, verify
    from sglang_parse.engine.drafting import draft_prefill, parallel, token_by_token

    def async_h2d(values: list, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    def async_d2h(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cpu", non_blocking=True)

    def compute_position(_backend: str, _prefixes: Any, lens: torch.Tensor, num: int) -> tuple:
        """A kernel's; a pass has its own."""
        return torch.zeros(num, dtype=torch.int64, device=GPU), torch.zeros_like(lens)

    class Event:
        def __init__(self, *, enable_timing: bool = False) -> None: ...

        record = synchronize = staticmethod(lambda *_: None)
        query = staticmethod(lambda: True)
        elapsed_time = staticmethod(lambda _: 1.0)

    monkeypatch.setattr(device, "async_h2d", async_h2d)
    monkeypatch.setattr(device, "async_d2h", async_d2h)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for module in (broadcast, eagle, parallel, target, token_by_token, verify):
        monkeypatch.setattr(module, "broadcast", lambda values: values)
    for module in (parts, prefill):
        monkeypatch.setattr(module, "broadcast_object", lambda value: value)
    for module in (draft_prefill, parallel, forward):
        monkeypatch.setattr(module, "max_forward_rows", lambda: 1024)
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
    spec_algorithm = lora_manager = prefill_cuda_graph_runner = None
    is_draft_worker = False
    model_config = SimpleNamespace(
        model_is_mrope=False,
        requires_mm_token_modalities=False,
        vocab_size=VOCAB,
        context_len=WIDTH,
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
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

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
        logits, hidden = torch.zeros(num_rows, VOCAB, device=GPU), None
        if forward_batch.capture_hidden_mode.is_full():
            hidden = torch.zeros(len(forward_batch.input_ids), 6, device=GPU)
        return SimpleNamespace(
            logits_output=LogitsProcessorOutput(next_token_logits=logits, hidden_states=hidden),
            can_run_graph=forward_batch.forward_mode.is_decode(),
        )

    def _load_graph(self, forward_batch: Any) -> None:
        """Does the same as SGLang before it replays the CUDA graph of a step."""
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
        # Of an extend SGLang's sampler takes the last position of each request itself.
        positions = view.positions if view.forward_mode.is_decode() else view.seq_lens
        for tensor in (positions, view.sampling_info.temperatures, view.req_pool_indices):
            assert len(tensor) == len(output.next_token_logits)
            assert tensor.device == GPU
        return output.next_token_logits.argmax(-1).to(torch.int32)


class TargetWorker:
    """The target's worker, as prefills use it."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def set_hicache_consumer(self, _: Any) -> None:
        """There is no such cache."""

    def forward_batch_generation(self, _: Any, forward_batch: Any, **__: Any) -> Any:
        return self._runner.forward(forward_batch)


def arrived(copy: Any) -> Any:
    """``DRAFTED`` in the shape of a ``HostCopy``, in lists."""
    numbers: Any = DRAFTED
    for length in reversed(copy._host.shape):
        numbers = [numbers] * length
    return numbers


def request(
    number: int,
    phase: Phase,
    move: Action,
    *,
    top_k: int = 1,
    draft: int = 0,
    allocated: int = PROMPT + 8,
) -> Any:
    """A running request with a prompt and one output token."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    questions = {"prefix_ends": [draft], "question_ids": [[1, 2]]} if move is Action.VERIFY else {}
    params = SamplingParams(top_k=top_k, max_new_tokens=30, ignore_eos=True)
    req = Req(str(number), "", array("q", [1] * PROMPT), params, vocab_size=VOCAB)
    req.kv.req_pool_idx, req.kv.kv_allocated_len = number, allocated
    req.parse_state = RequestState(
        RequestPolicy(threshold=0.5, judge="question"),
        phase=phase,
        action=move,
        output_ids=[7],
        committed=PROMPT,
        prefilled_len=PROMPT,
        draft_kv_len=PROMPT,
        draft_kv_found=True,
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


def prefill_batch_of(*reqs: Any) -> Any:
    """A batch that prefills these requests' prompts."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch, num_reqs = batch_of(*reqs), len(reqs)
    batch.forward_mode = ForwardMode.EXTEND
    batch.input_ids = torch.zeros(num_reqs * PROMPT, dtype=torch.int64, device=GPU)
    batch.out_cache_loc = torch.zeros(num_reqs * PROMPT, dtype=torch.int64, device=GPU)
    batch.seq_lens = torch.full((num_reqs,), PROMPT, device=GPU)
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.extend_lens, batch.prefix_lens = [PROMPT] * num_reqs, [0] * num_reqs
    batch.extend_logprob_start_lens = batch.extend_lens
    batch.extend_num_tokens = batch.seq_lens_sum = num_reqs * PROMPT
    batch.is_prefill_only, batch.chunked_req = False, None
    # The lengths are looked at on the host, where fake tensors have none.
    batch.seq_lens_cpu = SimpleNamespace(tolist=lambda: [PROMPT] * num_reqs)
    for req in reqs:
        req.extend_end, req.full_untruncated_fill_ids = PROMPT, [1] * PROMPT
    return batch


def engine_for(
    batch: Any,
    *,
    is_masked: bool = True,
    question: Any = QUESTION,
    config: ParseConfig = CONFIG,
    block_size: int = 1,
    plans_on_device: bool = True,
    has_head: bool = False,
) -> Any:
    """Returns a server's engine, over runners that compute nothing; ``has_head``: of the draft."""
    from sglang_parse.engine.drafting.draft_model import DraftModel
    from sglang_parse.engine.drafting.drafter import Drafter
    from sglang_parse.engine.drafting.kv_marks import DraftKvMarks
    from sglang_parse.engine.faults import DraftGuard
    from sglang_parse.engine.parts import Engine
    from sglang_parse.engine.sources.eagle import take_chain
    from sglang_parse.engine.target import TargetModel
    from sglang_parse.engine.verify import Verifier

    table = batch.req_to_token_pool.req_to_token
    target, draft = object.__new__(TargetModel), object.__new__(DraftModel)
    runner = Runner(table)
    vars(target).update(runner=runner, worker=TargetWorker(runner))
    vars(draft).update(
        draft_runner=Runner(table),
        device=GPU,
        runs_ahead=True,
        graph_reqs=8,
        block_graphs={},
        prefill_graphs=[],
        mask_id=VOCAB - 1,
        is_masked=is_masked,
        plans_on_device=plans_on_device,
        req_to_token=table,
        kv=DraftKvMarks(table, len(batch.reqs) * WIDTH),
    )
    if has_head:
        draft.head = draft_head(batch)
    kinds = block_kinds(block_size, allow_one_token=False, has_head=has_head)
    parts = engine_parts(config, controller := Controller(kinds=kinds), question=question)
    return Engine(
        config=config,
        drafter=Drafter(draft, controller.blocks, config.draft_tokens),
        draft_guard=DraftGuard(1),
        eagle=None,
        judge=parts.judge,
        verifier=Verifier(target, parts.judge, is_masked=is_masked),
        committer=SimpleNamespace(
            begin=lambda req, first_id: req.parse_state.output_ids.append(first_id),
            ask=lambda _: None,
            candidates_pay=lambda *_: True,
            poll=lambda _: None,
            take_proposals=lambda reqs, chains: [*map(take_chain, reqs, chains)],
        ),
        schedule=SimpleNamespace(invalidate=lambda: None),
        sources=SimpleNamespace(begin=lambda _: None, poll=lambda *_, **__: None),
        controller=controller,
        counters=SimpleNamespace(count=lambda *_: None),
        certified=SimpleNamespace(),
        layout=MASK if is_masked else ALIAS,
    )


def draft_head(batch: Any) -> Any:
    """An EAGLE-3 head with a vocabulary of its own."""
    from sglang_parse.engine.drafting.draft_head import DraftHead

    head = object.__new__(DraftHead)
    head.worker = SimpleNamespace(
        draft_runner=Runner(batch.req_to_token_pool.req_to_token),
        hot_token_id=torch.zeros(VOCAB, dtype=torch.int64, device=GPU),
        req_to_token_pool=batch.req_to_token_pool,
        parallel_layout=SimpleNamespace(tp_group=None),
    )
    head.forward_contexts = nullcontext
    return head


def launched(batch: Any, engine: Any = None, before: Any = None) -> tuple[Any, Any]:
    """An iteration of ``batch`` in flight, and its engine."""
    from sglang_parse.engine.step import Step

    engine = engine or engine_for(batch)
    step = Step(engine, batch, engine.config.draft_chunk)
    step.launch(before)
    # An exception in the draft model's part is contained, and ends its requests.
    assert not any(req.parse_state.fault for req in batch.reqs)
    return step, engine


def drafting(number: int, *, top_k: int = 1, gap: int = 0) -> Any:
    """A request that drafts; ``gap`` tokens before the last one lack draft KV."""
    req = request(number, Phase.DRAFTING, Action.DRAFT, top_k=top_k, allocated=PROMPT + 200)
    req.sampling_params.max_new_tokens = 1000
    req.parse_state.draft_kv_len -= gap
    return req


def drafting_batch(*reqs: Any, num_steps: int = CHUNK) -> tuple[Any, Any]:
    """A batch of them, and its engine."""
    batch = batch_of(*reqs)
    config = ParseConfig(draft_tokens=512, draft_chunk=num_steps)
    return batch, engine_for(batch, config=config)


def in_blocks(
    *reqs: Any, masks: str = "last", num_blocks: int = BLOCKS, **settings: Any
) -> tuple[Any, Any]:
    """As ``drafting_batch``: chunks of blocks, which are expected to bring half of their tokens, a
    draft's first one a token."""
    batch = batch_of(*reqs)
    config = ParseConfig(draft_tokens=512, draft_chunk=1 + SIZE // 2 * (num_blocks - 1))
    has_head = masks == "head"
    engine = engine_for(batch, config=config, block_size=SIZE, has_head=has_head, **settings)
    (plan,) = (plan for plan in engine.controller.blocks.costs if plan.masks.value == masks)
    engine.controller.blocks.choose = lambda *_: plan
    engine.schedule.all_take = lambda *_: True
    return batch, engine
