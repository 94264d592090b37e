"""Where the host waits for the device while it drafts, and which forwards it launches.

Counted on a GPU without numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_parse.core.block import block_kinds
from sglang_parse.core.config import ParseConfig
from sglang_parse.core.phases import Action, Phase, RequestPolicy
from sglang_parse.core.policy.controller import Controller
from sglang_parse.core.policy.limits import Limits
from sglang_parse.core.round import Round
from sglang_parse.engine.overlap import can_launch_before_sync
from support.fake_engine import (
    BLOCKS,
    CHUNK,
    DRAFTED,
    PROMPT,
    SIZE,
    VOCAB,
    WIDTH,
    Runner,
    arrived,
    batch_of,
    drafting,
    drafting_batch,
    engine_for,
    in_blocks,
    launched,
    prefill_batch_of,
    request,
)
from support.fake_gpu import GPU
from support.launch_counts import Launches, Operations

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("gpu")]

MAX_STEPS, STEPS_AHEAD = 3, 4
"""``draft_prefill``'s and ``token_by_token``'s."""


Count = Callable[[Callable[[], Any]], Launches]


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    """Counts what a call launches and waits for; every token that arrives is ``DRAFTED``."""
    from sglang_parse.device import HostCopy

    found, forward, init = Launches(), Runner.forward, HostCopy.__init__

    def launch(runner: Runner, forward_batch: Any) -> Any:
        found.forwards[forward_batch.forward_mode.name] += 1
        return forward(runner, forward_batch)

    def send(copy: Any, tensor: torch.Tensor) -> None:
        init(copy, tensor)
        copy.number = found.num_forwards

    def read(copy: Any) -> list:
        found.wait(copy.number)
        return arrived(copy)

    monkeypatch.setattr(Runner, "forward", launch)
    monkeypatch.setattr(HostCopy, "__init__", send)
    monkeypatch.setattr(HostCopy, "tolist", read)
    return found.during


@pytest.mark.parametrize("num_reqs", [1, 8])
def test_a_chunk_of_16(count: Count, num_reqs: int):
    batch, engine = drafting_batch(*map(drafting, range(num_reqs)))
    found = count(lambda: launched(batch, engine))
    assert found.forwards == {"DECODE": CHUNK}
    assert found.waits == 0


@pytest.mark.parametrize(("gap", "extends"), [(1, 0), (MAX_STEPS, 0), (MAX_STEPS + 1, 1)])
def test_draft_kv_catches_up_by_steps(count: Count, gap: int, extends: int):
    """After an accepted draft one token lacks draft KV."""
    behind = drafting(0, gap=gap)
    behind.parse_state.prefilled_len -= gap  # the answer's tokens, not the prompt's
    batch, engine = drafting_batch(behind, drafting(1))
    found = count(lambda: launched(batch, engine))
    assert found.forwards["EXTEND"] == extends
    assert found.forwards["DECODE"] == CHUNK + (-1 if extends else gap)
    assert found.waits == 0


def test_a_chunk_after_one_in_flight(count: Count):
    """The device is never without work."""
    reqs = [drafting(0), drafting(1)]
    batch, engine = drafting_batch(*reqs)
    first, _ = launched(batch, engine)
    engine.schedule.all_take = lambda *_: True

    def next_chunk() -> None:
        assert can_launch_before_sync(first, reqs)
        launched(batch, engine, first)
        first.chunk.wait()

    found = count(next_chunk)
    assert found.forwards == {"DECODE": CHUNK}
    assert (found.waits, found.drains) == (2, 0)
    assert [req.parse_state.num_drafted for req in reqs] == [CHUNK] * 2


# -- blocks ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("masks", "is_masked"),
    [("last", True), ("every", False), ("every", True)],
    ids=["last", "every-alias", "every-mask"],
)
@pytest.mark.parametrize("num_reqs", [1, 8])
def test_a_chunk_of_blocks(count: Count, num_reqs: int, masks: str, is_masked: bool):
    batch, engine = in_blocks(*map(drafting, range(num_reqs)), masks=masks, is_masked=is_masked)
    found = count(lambda: launched(batch, engine))
    assert found.forwards == {"DRAFT_EXTEND_V2": BLOCKS}
    assert found.waits == 0


@pytest.mark.parametrize("top_k", [1, 5])
def test_a_chunk_of_blocks_with_a_head(count: Count, top_k: int):
    """The head goes on behind tokens that only the device knows."""
    batch, engine = in_blocks(drafting(0), drafting(1, top_k=top_k), masks="head")
    heads = engine.drafter.model.head.runner.forwards
    found = count(lambda: launched(batch, engine))
    assert found.forwards == {"DRAFT_EXTEND_V2": BLOCKS * SIZE}  # the head's: SIZE - 1 of them
    assert [len(forward.input_ids) for forward in heads] == [2 * SIZE, *[2] * (SIZE - 2)] * BLOCKS
    assert found.waits == 0


@pytest.mark.parametrize("masks", ["last", "head"])
def test_a_chunk_of_blocks_after_one_in_flight(count: Count, masks: str):
    """The device is never without work."""
    reqs = [drafting(0), drafting(1)]
    batch, engine = in_blocks(*reqs, masks=masks)
    first, _ = launched(batch, engine)

    def next_chunk() -> None:
        assert can_launch_before_sync(first, reqs)
        launched(batch, engine, first)
        first.chunk.wait()

    found = count(next_chunk)
    num_forwards = BLOCKS * (SIZE if masks == "head" else 1)
    assert found.forwards == {"DRAFT_EXTEND_V2": num_forwards}
    assert (found.waits, found.drains) == (2, 0)
    # Of each block five tokens were kept, and as many proposed.
    states = [req.parse_state for req in reqs]
    assert [state.num_drafted for state in states] == [BLOCKS * DRAFTED] * 2
    assert [state.num_draft_inflight for state in states] == [BLOCKS * SIZE] * 2
    assert [state.draft.candidates for state in states] == [(DRAFTED,) * DRAFTED] * 2


@pytest.mark.parametrize("top_k", [1, 5])
def test_a_chunk_of_blocks_in_graphs(count: Count, top_k: int):
    """One replay each, whatever attention backend the draft model has; requests that sample take
    their logits from it, and nothing waits."""
    batch, engine = in_blocks(drafting(0), drafting(1, top_k=top_k), plans_on_device=False)
    layout, replayed = engine.controller.blocks.choose(2), Counter[str]()
    width = layout.rows(0).num_rows

    class Graphs:
        max_bs = 2

        def run(self, state: Any, *_: Any) -> tuple[Any, torch.Tensor]:
            replayed["block"] += 1
            return state, torch.zeros(2, 2 * SIZE + 1, dtype=torch.int64, device=GPU)

        def output_of(self, requests: slice) -> tuple[torch.Tensor, None]:
            replayed["logits"] += 1
            rows = (requests.stop - requests.start) * width
            return torch.zeros(rows, VOCAB, device=GPU), None

    engine.drafter.model.block_graphs = {layout: Graphs()}
    candidates: list[Any] = []
    engine.controller.blocks.choose = lambda _, among: candidates.extend(among) or layout
    found = count(lambda: launched(batch, engine))
    assert (found.forwards, found.waits) == ({}, 0)
    assert replayed == ({"block": BLOCKS} if top_k == 1 else {"block": BLOCKS, "logits": BLOCKS})
    assert engine.drafter.model.replays
    assert candidates == [layout]  # the other one would run in pieces


@pytest.mark.parametrize("width", [PROMPT - 1, PROMPT])
def test_a_draft_prefill_in_a_graph(count: Count, width: int):
    """The narrowest one that fits; none is a forward of SGLang's runner."""
    req = drafting(0, gap=PROMPT)
    batch, engine = drafting_batch(req)
    replayed: list[Any] = []

    class Graphs:
        fits = staticmethod(lambda batch: max(batch.extend_seq_lens_cpu) <= width)

        def run(self, batch: Any) -> Any:
            replayed.append((batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu))
            logits = torch.zeros(1, VOCAB, device=GPU)
            return SimpleNamespace(next_token_logits=logits), width

    engine.drafter.model.prefill_graphs = [Graphs()]
    found = count(lambda: engine.drafter.model.extend([req], [0], [PROMPT]))
    fits = width == PROMPT
    assert replayed == ([([0], [PROMPT])] if fits else [])
    assert found.forwards == ({} if fits else {"EXTEND": 1})
    assert engine.drafter.model.replays == fits


@pytest.mark.parametrize(
    ("allocated", "budget", "blocks"),
    [(200, 512, 15), (BLOCKS * SIZE + 15, 512, BLOCKS + 1), (BLOCKS * SIZE + 15, 20, 11)],
    ids=["slots for more", "slots for the chunk", "slots for the draft"],
)
def test_as_many_blocks_as_the_tokens_are_expected_to_take(
    count: Count, allocated: int, budget: int, blocks: int
):
    """But none that might have to begin behind the slots, which are a chunk's tokens and a block,
    before the draft is over."""
    req = drafting(0)
    req.kv.kv_allocated_len = PROMPT + allocated
    req.sampling_params.max_new_tokens = 1 + budget
    batch, engine = in_blocks(req, num_blocks=2 * BLOCKS)
    (cost,) = (c for x, c in engine.controller.blocks.costs.items() if x.masks.value == "last")
    cost.num_tokens, cost.num_used = 20.0, 10.0
    found = count(lambda: launched(batch, engine))
    assert found.forwards == {"DRAFT_EXTEND_V2": blocks}


@pytest.mark.parametrize(("length", "blocks"), [(1, 1), (5, 2), (16, 5), (24, 6), (48, 11)])
@pytest.mark.usefixtures("count")
def test_a_drafts_first_block_brings_one_token(length: int, blocks: int):
    """At 4.9 a block drafts of 16, 24 and 48 were short of one block, and took a second chunk."""
    req = drafting(0)
    req.sampling_params.max_new_tokens = 1 + length
    batch, engine = in_blocks(req, num_blocks=4 * BLOCKS)
    (cost,) = (c for x, c in engine.controller.blocks.costs.items() if x.masks.value == "last")
    cost.num_tokens, cost.num_used = 49.0, 10.0
    iteration, _ = launched(batch, engine)
    assert iteration.chunk.num_forwards == blocks


def test_a_chunk_that_measures_its_layout(count: Count):
    """It is short, and the next chunk may have another layout."""
    reqs = [drafting(0), drafting(1)]
    batch, engine = in_blocks(*reqs)
    engine.controller.blocks.probe_tokens = SIZE
    first: list[Any] = []
    found = count(lambda: first.extend(launched(batch, engine)))
    assert found.forwards == {"DRAFT_EXTEND_V2": 3}
    assert not can_launch_before_sync(first[0], reqs)


@pytest.mark.parametrize(("budget", "inside"), [(4, 0), (100, BLOCKS - 1)])
@pytest.mark.usefixtures("count")
def test_blocks_inside_a_draft_tell_what_blocks_bring(budget: int, inside: int):
    """Not the first one, which has nothing to confirm, nor one that the draft's length cuts."""
    req = drafting(0)
    req.sampling_params.max_new_tokens = 1 + budget
    batch, engine = in_blocks(req)
    iteration, _ = launched(batch, engine)
    iteration.chunk.wait()
    num_tokens, num_blocks = iteration.chunk.continued
    assert num_blocks == inside
    assert inside <= num_tokens < iteration.chunk.tokens_per_request


@pytest.mark.usefixtures("count")
def test_blocks_behind_what_ended_a_draft_are_dropped():
    """At a stop token inside a block, others of its chunk and the next chunk after it."""
    req = drafting(0)
    batch, engine = in_blocks(req)
    first, _ = launched(batch, engine)
    second_at = first.chunk.num_forwards
    first.chunk._in_flight[0][1].tolist()
    second, _ = launched(batch, engine, first)
    req.parse_state.policy = RequestPolicy(threshold=0.5, stop_ids=frozenset({DRAFTED}))
    for iteration in (first, second):
        iteration.chunk.wait()
    state = req.parse_state
    assert (state.phase, state.num_draft_inflight) == (Phase.VERIFYING, 0)
    assert (state.num_drafted, state.notes.telemetry.stats.draft_forwards) == (1, 1)
    assert (first.chunk.finished, second.chunk.finished) == ([0], [])
    assert (first.chunk.continued, second.chunk.continued) == ((0, 0), (0, 0))
    assert second_at == second.chunk.num_forwards == BLOCKS


@pytest.mark.parametrize(("num_drafted", "blocks"), [(0, 4), (20, 3), (29, 1)])
def test_a_chunk_has_no_more_blocks_than_the_longest_budget(
    count: Count, num_drafted: int, blocks: int
):
    """29 tokens are left of the answer; a draft that is whole already takes one block."""
    req = drafting(0)
    req.sampling_params.max_new_tokens = 30
    req.parse_state.draft.token_ids = [DRAFTED] * num_drafted
    req.parse_state.draft_kv_len += num_drafted
    batch, engine = in_blocks(req)
    found = count(lambda: launched(batch, engine)[0].chunk.wait())
    assert found.forwards == {"DRAFT_EXTEND_V2": blocks}
    expected = (Phase.DRAFTING, Phase.VERIFYING)[num_drafted > 0]
    assert req.parse_state.phase is expected


@pytest.mark.usefixtures("count")
@pytest.mark.parametrize("ends", ["budget", "stop", "abort", "room"])
def test_no_chunk_after_one_that_may_end_a_draft(ends: str):
    """All of it is read before the next plan then."""
    req = drafting(0)
    batch, engine = drafting_batch(req)
    engine.schedule.all_take = lambda *_: ends != "room"
    first, _ = launched(batch, engine)
    if ends == "budget":
        req.sampling_params.max_new_tokens = 1 + CHUNK
    elif ends == "stop":
        policy = RequestPolicy(threshold=0.5, stop_ids=frozenset({DRAFTED}))
        req.parse_state.policy = policy
    elif ends == "abort":
        req.finished_reason = "abort"
    assert not can_launch_before_sync(first, [req])


@pytest.mark.parametrize(("num_drafted", "steps"), [(0, 16), (27, 2), (29, 1)])
def test_a_chunk_is_no_longer_than_the_longest_budget(count: Count, num_drafted: int, steps: int):
    """29 tokens are left of the answer; a draft that is whole already takes one step."""
    req = drafting(0)
    req.sampling_params.max_new_tokens = 30
    req.parse_state.draft.token_ids = [DRAFTED] * num_drafted
    req.parse_state.draft_kv_len += num_drafted
    batch, engine = drafting_batch(req)
    found = count(lambda: launched(batch, engine)[0].chunk.wait())
    assert found.forwards == {"DECODE": steps}
    expected = (Phase.DRAFTING, Phase.VERIFYING)[num_drafted > 0]
    assert req.parse_state.phase is expected


@pytest.mark.parametrize(("free", "has_room"), [(100, True), (30, False)])
def test_room_for_a_chunk_and_its_verification(free: int, has_room: bool):
    """A chunk in flight counts as drafted: 16 more for each, and a pass's questions."""
    from sglang_parse.engine.schedule import Schedule

    reqs = [drafting(i) for i in range(2)]
    batch, _ = drafting_batch(*reqs)
    for req in reqs:
        req.kv.kv_allocated_len = PROMPT + CHUNK
        req.parse_state.launch_draft(CHUNK)
    pool = SimpleNamespace(available_size=lambda: free, page_size=1)
    batch.token_to_kv_pool_allocator = pool
    batch.tree_cache = SimpleNamespace(
        token_to_kv_pool_allocator=pool, evictable_size=lambda: 0, supports_swa=lambda: False
    )
    config = ParseConfig(draft_chunk=CHUNK, max_prefixes=1)
    schedule = Schedule(config, Controller(Limits.of(config, 5)), max_question_len=5)
    assert schedule.all_take(Action.DRAFT, batch, reqs) == has_room


@pytest.mark.parametrize(("pools", "free"), [((90, 5, 40, 7), 47), ((20, 5, 90, 7), 25)])
def test_the_scarcer_of_two_pools_decides(pools: tuple[int, ...], free: int):
    """Free slots and those that the cache can give up, of both."""
    from sglang_parse.engine.schedule import _available_slots

    slots = [lambda n=n: n for n in pools]
    allocator = SimpleNamespace(full_available_size=slots[0], swa_available_size=slots[2])
    cache = SimpleNamespace(full_evictable_size=slots[1], swa_evictable_size=slots[3])
    cache.token_to_kv_pool_allocator, cache.supports_swa = allocator, lambda: True
    assert _available_slots(cache) == free


def test_windows_are_freed_behind_the_plan(monkeypatch: pytest.MonkeyPatch):
    """SGLang has checked that the plan fits; one for more slots may take more than there are."""
    from sglang_parse.engine import schedule as module

    order: list[str] = []
    plan = module.IterationPlan((), available=0, grants=(), draft_chunk=3, num_required=0)
    schedule = object.__new__(module.Schedule)
    monkeypatch.setattr(schedule, "plan_iteration", lambda *_: order.append("plan") or plan, False)
    monkeypatch.setattr(module, "_allocate", lambda *_: order.append("allocate"))
    cache = SimpleNamespace(token_to_kv_pool_allocator=None)
    batch = SimpleNamespace(
        reqs=[], tree_cache=cache, maybe_evict_swa=lambda: order.append("evict")
    )
    assert schedule.apply(batch) == 3
    assert order == ["plan", "evict", "allocate"]


@pytest.mark.parametrize(("block_size", "rows"), [(1, 0), (4, 16)])
def test_slots_for_a_block_after_the_last_token_of_a_chunk(block_size: int, rows: int):
    """One slot fewer, and a block in vain would stand on KV of the draft that counts."""
    from sglang_parse.engine.schedule import Schedule

    req = drafting(0)
    req.parse_state.draft.token_ids = [DRAFTED] * 3
    req.parse_state.launch_draft(4)
    config = ParseConfig(draft_chunk=CHUNK)
    kinds = block_kinds(block_size, allow_one_token=False)
    schedule = Schedule(config, Controller(Limits.of(config, 0), kinds=kinds), 0)
    assert schedule._demand(req).lookahead_slots == 3 + 4 + CHUNK + rows


@pytest.mark.usefixtures("count")
def test_a_chunk_after_the_end_of_a_draft_is_dropped():
    """The draft ended in the steps that were read late."""
    req = drafting(0)
    batch, engine = drafting_batch(req)
    engine.schedule.all_take = lambda *_: True
    first, _ = launched(batch, engine)
    assert can_launch_before_sync(first, [req])
    req.parse_state.policy = RequestPolicy(threshold=0.5, stop_ids=frozenset({DRAFTED}))
    second, _ = launched(batch, engine, first)
    for iteration in (first, second):
        iteration.chunk.wait()
    state = req.parse_state
    assert (state.phase, state.num_draft_inflight) == (Phase.VERIFYING, 0)
    assert state.num_drafted == CHUNK - STEPS_AHEAD + 1
    assert (first.chunk.finished, second.chunk.finished) == ([0], [])


def test_a_chunk_beside_steps_is_read_after_them(count: Count):
    batch, engine = drafting_batch(drafting(0), request(1, Phase.DECODING, Action.DECODE))
    found = count(lambda: launched(batch, engine))
    assert found.forwards == {"DECODE": CHUNK + 1}
    assert found.waits == 0


def test_a_prefill(count: Count):
    from sglang_parse.engine.prefill import prefill

    batch = prefill_batch_of(*(request(i, Phase.DRAFTING, Action.DRAFT) for i in range(8)))
    engine = engine_for(batch)
    found = count(lambda: prefill(engine, batch))
    assert found.forwards == {"EXTEND": 1}
    assert found.waits == 1
    assert [req.parse_state.output_ids for req in batch.reqs] == [[DRAFTED]] * 8


@pytest.mark.parametrize("cached", [0, 5])
def test_what_drafts_begin_with(count: Count, cached: int, monkeypatch: Any):
    """Eight prompts that the draft model has not read: one forward, and one look at the marks if
    the radix cache had a part of one of them."""
    from sglang_parse.engine.drafting import draft_prefill

    monkeypatch.setattr(draft_prefill, "MAX_PENDING", 3)
    reqs = [drafting(i, gap=PROMPT) for i in range(8)]
    for req in reqs:
        req.parse_state.draft_kv_found = False
    reqs[3].cached_tokens = cached
    batch, engine = drafting_batch(*reqs)
    found = count(lambda: draft_prefill.prefill_missing(engine.drafter.model, batch.reqs))
    assert found.forwards == {"EXTEND": 1}
    assert found.waits == (cached > 0)
    # SGLang has not processed the prefill: these slots may be replaced by others' without draft KV.
    assert not any(req.parse_state.draft_kv_found for req in reqs)
    assert count(lambda: draft_prefill.prefill_missing(engine.drafter.model, batch.reqs)).waits == 1


def test_a_fill_is_no_larger_than_a_chunk_of_prefill(count: Count, monkeypatch: Any):
    """Who finds no room is read for in the next iterations."""
    from sglang_parse.engine.drafting import draft_prefill

    monkeypatch.setattr(draft_prefill, "max_forward_rows", lambda: 20)
    monkeypatch.setattr(draft_prefill, "MAX_PENDING", 3)
    batch, engine = drafting_batch(
        *(drafting(i, gap=gap) for i, gap in enumerate((2, 12, 10, 10, 20)))
    )
    read = []

    def until_all_draft() -> None:
        while any(counts := draft_prefill.prefill_missing(engine.drafter.model, batch.reqs)):
            read.append(counts)

    found = count(until_all_draft)
    assert read == [[0, 12, 8, 0, 0], [0, 0, 0, 10, 10], [0, 0, 0, 0, 10]]
    assert found.forwards == {"EXTEND": 3}


def a_pass(*reqs: Any) -> tuple[Any, Any]:
    """Drafts of six tokens, without questions, whose masks are the requests' own."""
    for req in reqs:
        req.parse_state.draft.token_ids = [DRAFTED] * 6
        req.parse_state.phase, req.parse_state.action = Phase.VERIFYING, Action.VERIFY
        req.parse_state.ask([], [])
    batch = batch_of(*reqs)
    return batch, engine_for(batch, question=None)


def a_step(*reqs: Any) -> tuple[Any, Any]:
    for req in reqs:
        req.parse_state.phase, req.parse_state.action = Phase.PLAIN, Action.DECODE
    return (batch := batch_of(*reqs)), engine_for(batch)


def counted(found: Operations) -> Counter[str]:
    return Counter(name for name in found.names if not name.startswith("prim."))  # attributes


@pytest.mark.parametrize("kind", [a_pass, a_step, drafting_batch, in_blocks])
def test_operations_of_a_launch_do_not_grow_with_requests(kind: Callable[..., tuple[Any, Any]]):
    """Each takes the host some microseconds, one that only makes a view, too."""

    def operations(num_reqs: int) -> Counter[str]:
        batch, engine = kind(*map(drafting, range(num_reqs)))
        with Operations() as found:
            launched(batch, engine)
        return counted(found)

    assert operations(2) == operations(7)  # graphs of steps pad both to 8


def test_operations_behind_a_pass_do_not_grow_with_requests():
    """What was rejected is freed at once."""
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    def operations(num_reqs: int) -> Counter[str]:
        batch, engine = a_pass(*map(drafting, range(num_reqs)))
        pool = TokenToKVPoolAllocator(1000, torch.bfloat16, GPU, None, need_sort=False)
        batch.tree_cache = SimpleNamespace(
            token_to_kv_pool_allocator=pool, req_to_token_pool=batch.req_to_token_pool
        )
        engine.committer.move_on = lambda *_: None
        for req in batch.reqs:
            req.kv.kv_allocated_len = WIDTH
        free, (step, _) = pool.available_size(), launched(batch, engine)
        with Operations() as found:
            step._move_on([Round(bonus=(DRAFTED,))] * num_reqs)
        assert pool.available_size() == free + num_reqs * (WIDTH - PROMPT - 6)
        return counted(found)

    found = operations(2)
    assert found == operations(16)
    assert found.total() == 6, found
