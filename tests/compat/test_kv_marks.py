"""Marks of the draft model's KV, with SGLang's allocators of slots: a slot that gets other tokens,
by whichever road, has none of their draft KV."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.compat
NUM_SLOTS = 96
PROMPT = 20


class Server:
    """Prompts and marks on the slots of an allocator."""

    def __init__(self, allocator: Any) -> None:
        from sglang_parse.engine.drafting.kv_marks import DraftKvMarks

        self.allocator = allocator
        self.table = torch.zeros(4, NUM_SLOTS, dtype=torch.int32)
        self.marks = DraftKvMarks(self.table, NUM_SLOTS + allocator.page_size)
        self.marks.allocator = getattr(allocator, "full_attn_allocator", allocator)

    def note_allocated(self, allocator: Any, slots: torch.Tensor) -> None:
        if allocator is self.marks.allocator:
            self.marks.note_allocated(slots)

    def request(self, row: int, slots: torch.Tensor) -> SimpleNamespace:
        from sglang_parse.core.phases import RequestPolicy
        from sglang_parse.core.request import RequestState

        self.table[row, : len(slots)] = slots
        state = RequestState(RequestPolicy(0.5))
        state.restart(len(slots), ())
        return SimpleNamespace(
            kv=SimpleNamespace(req_pool_idx=row),
            parse_state=state,
            cached_tokens=len(slots),
            origin_input_ids=[0] * len(slots),
            output_ids=[1],
        )

    def known(self, req: SimpleNamespace) -> int:
        """Tokens with draft KV, at a launch."""
        self.marks.unmark_allocated()
        self.marks.look_up([req])
        return req.parse_state.draft_kv_len


def make(kind: str) -> Any:
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    same = {"dtype": torch.float32, "device": "cpu", "kvcache": None, "need_sort": False}
    if kind == "token":
        return TokenToKVPoolAllocator(NUM_SLOTS, **same)
    return PagedTokenToKVPoolAllocator(NUM_SLOTS, 4, **same)


@pytest.fixture(params=["token", "paged"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Server:
    from sglang.srt.plugins import load_plugins

    from sglang_parse import context

    load_plugins()
    one = Server(make(request.param))
    monkeypatch.setattr(context.process_context(), "pipeline", one)
    return one


def prefill(server: Server) -> torch.Tensor:
    """As SGLang's prefill of a prompt: slots of its extend."""
    if server.allocator.page_size == 1:
        return server.allocator.alloc(PROMPT)
    start, end = torch.tensor([0]), torch.tensor([PROMPT])
    return server.allocator.alloc_extend(start, start, end, end, torch.tensor([-1]), PROMPT)


def load_back(server: Server) -> torch.Tensor:
    """As the hierarchical cache: slots for KV that is copied from the host."""
    return server.allocator.alloc(PROMPT)


@pytest.mark.parametrize("take", [prefill, load_back])
def test_slots_with_a_new_owner(server: Server, take: Callable[[Server], torch.Tensor]):
    slots = prefill(server)
    first = server.request(1, slots)
    assert server.known(first) == 0
    server.marks.mark([(first, 0, PROMPT)])
    again = server.request(2, slots)  # a hit in the prefix cache
    assert server.known(again) == PROMPT
    server.allocator.free(slots)
    rest = server.allocator.alloc(NUM_SLOTS - PROMPT)
    others = take(server)  # what the first one had
    assert set(others.tolist()) == set(slots.tolist())
    assert server.known(server.request(3, others)) == 0
    assert len(rest) + len(others) == NUM_SLOTS


def test_an_answers_slots(server: Server):
    """Marked as far as the draft model had come when it ended."""
    slots = prefill(server)
    req = server.request(1, slots)
    server.known(req)
    server.marks.mark([(req, 0, PROMPT)])
    answer = server.allocator.alloc(8)
    server.table[1, PROMPT : PROMPT + 8] = answer
    server.marks.unmark_allocated()
    req.parse_state.set_draft_kv_len(PROMPT + 5)
    server.marks.settle(req, PROMPT + 7)
    following = server.request(2, torch.cat([slots, answer]))
    assert server.known(following) == PROMPT + 5
