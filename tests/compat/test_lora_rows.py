"""SGLang's LoRA backends find each ragged row of a verify pass its request's adapter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_parse.core.layout import RequestLayout, VerifyLayout

pytestmark = pytest.mark.compat

LAYOUTS = (
    RequestLayout(prefix_len=9, num_draft_rows=6, visible_lens=(2, 6), question_lens=(3, 4)),
    RequestLayout(prefix_len=7, num_draft_rows=1),
    RequestLayout(prefix_len=5, num_draft_rows=3),
    RequestLayout(prefix_len=2, num_draft_rows=40),
)
LOGITS_ROWS = (8, 1, 3, 40)
ADAPTERS = ("a", None, "b", "a")
SLOTS = {None: 0, "a": 2, "b": 1}
MODULES = {
    "torch_native": "torch_backend",
    "triton": "triton_backend",
    "csgmv": "chunked_backend",
}


class UnpinnedTorch:
    """``torch`` without pinned memory, which needs an accelerator."""

    def __getattr__(self, name: str) -> Any:
        made = getattr(torch, name)
        if name not in ("tensor", "zeros", "empty", "arange"):
            return made
        return lambda *args, pin_memory=False, **kwargs: made(*args, **kwargs)  # noqa: ARG005


def manager_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A LoRA manager with the backend of that name, and two adapters in its memory pool."""
    from sglang.srt.lora.backend import chunked_backend
    from sglang.srt.lora.backend.lora_registry import get_backend_from_name
    from sglang.srt.lora.lora_manager import LoRAManager

    module = f"sglang.srt.lora.backend.{MODULES[name]}.torch"
    settings = SimpleNamespace(max_lora_chunk_size=16)
    monkeypatch.setattr(chunked_backend, "get_lora", lambda: settings)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    manager = object.__new__(LoRAManager)
    manager.lora_backend = get_backend_from_name(name)(
        max_loras_per_batch=3, device=torch.device("cpu"), server_args=None
    )
    monkeypatch.setattr(module, UnpinnedTorch())
    manager.max_loras_per_batch, manager.attn_dp_enabled = 3, False
    manager.memory_pool = SimpleNamespace(uid_to_buffer_id=SLOTS, get_buffer_id=SLOTS.get)
    adapter = SimpleNamespace(config=SimpleNamespace(r=4), scaling=2.0)
    manager.loras = {"a": adapter, "b": adapter}
    return manager


def verify_pass(adapters: tuple[str | None, ...]) -> Any:
    from sglang_parse.attention.spec_input import LAID_OUT, ParseVerifyInput

    sizes = [layout.num_rows for layout in LAYOUTS]
    return SimpleNamespace(
        forward_mode=LAID_OUT,
        spec_info=ParseVerifyInput(
            layout=VerifyLayout.of(LAYOUTS), custom_mask=None, select_index=torch.zeros(1)
        ),
        batch_size=len(sizes),
        extend_seq_lens=torch.tensor(sizes, dtype=torch.int32),
        extend_seq_lens_cpu=sizes,
        extend_num_tokens=sum(sizes),
        extend_logprob_start_lens_cpu=[
            size - logits for size, logits in zip(sizes, LOGITS_ROWS, strict=True)
        ],
        return_logprob=False,
        lora_ids=[*adapters],
    )


def prepare(manager: Any, forward_batch: Any) -> None:
    from sglang.srt.lora.lora_manager import LoRAManager

    from sglang_parse.patches.parse import lora_admitted

    lora_admitted._prepare(LoRAManager.prepare_lora_batch, manager, forward_batch)


def slots_by_row(info: Any, num_rows: int) -> list[int]:
    """Each row's adapter slot, as a backend's kernels find it."""
    slots = torch.full((num_rows,), -1)
    bounds = info.seg_indptr[: info.num_segments + 1].tolist()
    order = torch.arange(num_rows) if info.permutation is None else info.permutation
    for slot, start, end in zip(info.weight_indices.tolist(), bounds, bounds[1:], strict=False):
        slots[order[start:end].long()] = slot
    return slots.tolist()


@pytest.mark.parametrize("name", MODULES)
def test_rows_have_the_adapter_of_their_request(name: str, monkeypatch: pytest.MonkeyPatch):
    manager, forward_batch = manager_of(name, monkeypatch), verify_pass(ADAPTERS)
    prepare(manager, forward_batch)
    backend, sizes = manager.lora_backend, forward_batch.extend_seq_lens_cpu
    slots = [SLOTS[adapter] for adapter in ADAPTERS]
    expected = [slot for slot, size in zip(slots, sizes, strict=True) for _ in range(size)]
    assert slots_by_row(backend.batch_info, sum(sizes)) == expected
    assert backend.batch_info.has_active_lora
    if name != "torch_native":  # it has no kernels for adapters of the LM head
        head = backend.lm_head_batch_info
        expected = [slot for slot, n in zip(slots, LOGITS_ROWS, strict=True) for _ in range(n)]
        assert slots_by_row(head, sum(LOGITS_ROWS)) == expected
        assert head.expected_tokens == sum(LOGITS_ROWS)
    assert not forward_batch.return_logprob


@pytest.mark.parametrize("name", MODULES)
def test_a_pass_without_adapters_is_the_base_models(name: str, monkeypatch: pytest.MonkeyPatch):
    manager = manager_of(name, monkeypatch)
    prepare(manager, verify_pass(ADAPTERS))
    prepare(manager, verify_pass((None,) * len(LAYOUTS)))
    assert manager.lora_backend.batch_info is None


def test_a_pass_without_adapters_that_replays_a_graph(monkeypatch: pytest.MonkeyPatch):
    """The graph reads a buffer, in which the adapters of the pass before it would be left."""
    manager = manager_of("triton", monkeypatch)
    monkeypatch.setattr(type(manager), "can_use_prefill_cuda_graph", lambda *_: True)
    prepared = []
    monkeypatch.setattr(type(manager.lora_backend), "prepare_lora_batch", prepare_of(prepared))
    prepare(manager, verify_pass((None,) * len(LAYOUTS)))
    assert prepared == [[0] * len(LAYOUTS)]


def prepare_of(prepared: list[list[int]]) -> Any:
    def prepare_lora_batch(backend: Any, _batch: Any, slots: list[int], *_: Any, **__: Any) -> None:
        prepared.append(slots)
        backend.batch_info = SimpleNamespace()

    return prepare_lora_batch
