"""A block's body as its CUDA graph runs it, without a GPU: same rows and same tokens as a block
that the host plans, from tensors that stay where they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sglang_parse.core.block import NO_TOKEN, BlockKind, Masks
from sglang_parse.core.block_accept import ChainState, accept_blocks, accepted_block
from sglang_parse.engine.drafting import block_graphs, block_kernels
from sglang_parse.engine.drafting.block_graphs import BlockBody
from sglang_parse.engine.logits.sampling import surprisals_of
from sglang_parse.engine.wide_graphs import MAX_DRAFT_ROWS, graph_sizes_of
from support.interpreter import assert_passes_in_interpreter
from support.launch_counts import Operations

pytestmark = pytest.mark.compat

VOCAB, MASK_ID, MAX_REQS, CONTEXT, HIDDEN = 17, 16, 8, 200, 12
KINDS = [BlockKind(size, masks) for size in (2, 4) for masks in (Masks.LAST, Masks.EVERY)]
KINDS += [BlockKind(size, Masks.HEAD) for size in (1, 2, 4)]


@pytest.fixture(scope="module")
def table() -> torch.Tensor:
    """Slots of ten requests; row 0 is SGLang's padding row."""
    slots = torch.arange(10)[:, None] * CONTEXT + torch.arange(CONTEXT)
    slots[0] = 0
    return slots.to(torch.int32)


class Model:
    """Hidden states of a row depend on its token, its position and its slot alone."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        sizes = (VOCAB, CONTEXT, 10 * CONTEXT)
        self._parts = [torch.randn(n, HIDDEN, generator=generator) for n in sizes]
        self._head = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.head_rows = 0

    def hidden(self, *rows: torch.Tensor) -> torch.Tensor:
        return sum(part[index] for part, index in zip(self._parts, rows, strict=True))

    def propose(self, ids: torch.Tensor, starts: torch.Tensor, hidden: torch.Tensor) -> tuple:
        """As an EAGLE-3 head, whose state depends on all that it was given."""
        at = starts[:, None] + torch.arange(ids.shape[1])
        own = self._parts[0][ids] + self._parts[1][at] + hidden.roll(1, 2) / 2
        return (own @ self._head.T).argmax(2), own

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        self.head_rows += len(hidden)
        return hidden @ self._head.T


def body_of(kind: BlockKind, table: torch.Tensor) -> BlockBody:
    return BlockBody(
        *(kind, MASK_ID, table),
        max_reqs=MAX_REQS,
        last_position=CONTEXT - 1,
    )


def graph_of(body: BlockBody, model: Model, size: int) -> Callable[[], None]:
    """Replays read tensors of the body only, as a graph would: its views are made once."""
    rows = slice(size * body.width)
    views = body.ids[rows], body.positions[rows], body.slots[rows]

    def replay() -> None:
        body.load(size)
        hidden = model.hidden(*views)
        has_head = body._kind.masks is Masks.HEAD
        body.accept(hidden, model.head, (model.propose, hidden) if has_head else None)

    return replay


def states(kind: BlockKind, num_reqs: int, seed: int) -> ChainState:
    generator = torch.Generator().manual_seed(seed)

    def numbers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, (num_reqs, *shape), generator=generator)

    num_masks = kind.size - 1
    count = numbers(kind.size)
    candidates = numbers(VOCAB - 1, num_masks)
    candidates[torch.arange(num_masks) >= count[:, None]] = MASK_ID
    known = torch.minimum(numbers(kind.size), count)
    return ChainState(numbers(90) + 5, numbers(VOCAB - 1), candidates, count, known)


def planned(
    kind: BlockKind, model: Model, table: torch.Tensor, state: ChainState, pools: torch.Tensor
) -> tuple[ChainState, torch.Tensor]:
    """One block, row by row, by the kind's definition."""
    rows, choices, surprisals, proposed = kind.rows(0), [], [], []
    for i, pool in enumerate(pools.tolist()):
        start = int(state.starts[i])
        real = [int(state.last[i]), *state.candidates[i].tolist()]
        ids = torch.tensor(real + [MASK_ID] * (rows.num_rows - len(real)))
        positions = torch.tensor([min(start + p, CONTEXT - 1) for p in rows.positions()])
        slots = table[pool, start : start + rows.num_rows].long()
        hidden = model.hidden(ids, positions, slots)
        logits = model.head(hidden)
        choices.append(logits.argmax(1))
        surprisals.append(surprisals_of(logits, choices[-1])[: kind.size])
        proposed.append(proposal(model, state.pick(slice(i, i + 1)), choices[-1].tolist(), hidden))
    by_head = torch.tensor(proposed, dtype=torch.int64) if kind.masks is Masks.HEAD else None
    rows = torch.stack(choices), torch.stack(surprisals)
    return accept_blocks(kind.masks, state, *rows, MASK_ID, by_head)


def proposal(
    model: Model, state: ChainState, choices: list[int], hidden: torch.Tensor
) -> list[int]:
    """What a head proposes after one request's block, one row after another."""
    candidates, (start, known, count) = (
        state.candidates[0].tolist(),
        (int(part) for part in (state.starts, state.num_known, state.num_candidates)),
    )
    at, chain = 0, []
    while at < known or (at < count and candidates[at] == choices[at]):
        at += 1
    token, own = choices[at], hidden[at]
    for step in range(len(candidates)):
        ids, starts = torch.tensor([[token]]), torch.tensor([start + at + step])
        found, states = model.propose(ids, starts, own[None, None])
        token, own = int(found), states[0, 0]
        chain.append(token)
    return chain


@pytest.mark.parametrize(
    ("few_rows", "logits_rows"),
    [(10_000, 10_000), (10_000, 5), (0, 10_000), (0, 5)],
    ids=["all rows", "all rows in parts", "rows that matter", "in parts"],
)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_replays_are_the_planned_blocks(
    kind: BlockKind,
    few_rows: int,
    logits_rows: int,
    table: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
):
    """Three blocks after one another, of three requests in a graph of four, then of another."""
    monkeypatch.setattr(block_graphs, "FEW_ROWS", few_rows)
    monkeypatch.setattr(block_graphs, "LOGITS_ROWS", logits_rows)
    model, body = Model(3), body_of(kind, table)
    replay = graph_of(body, model, 4)
    for pools, seed in (([4, 9, 2], 1), ([7], 2), ([1, 2, 3, 4], 3)):
        state = expected = states(kind, len(pools), seed)
        at, limits = torch.tensor(pools), torch.full((len(pools),), 150)
        for _ in range(3):
            body.put(state, at, limits, 4)
            replay()
            state, record = body.take(len(pools))
            expected, expected_record = planned(kind, model, table, expected, at)
            assert all(torch.equal(*pair) for pair in zip(state, expected, strict=True))
            found, wanted = (map(accepted_block, r.tolist()) for r in (record, expected_record))
            assert [*found] == [*wanted]
        rows = slice(len(pools) * body.width, 4 * body.width)
        assert not body.slots[rows].any(), "padding reads and writes SGLang's padding slot"


@pytest.mark.nightly("tests/e2e/test_graphs.py")
@pytest.mark.skipif(block_kernels.ARE_USED, reason="they are used already")
def test_replays_by_kernels_are_the_planned_blocks():
    """The same tests, with Triton's interpreter for the kernels of a GPU."""
    assert_passes_in_interpreter(Path(__file__))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_block_is_two_kernels_beside_the_model(
    kind: BlockKind, table: torch.Tensor, monkeypatch: pytest.MonkeyPatch
):
    """One before its forward, one behind the choices, and a minimum; there were some 80."""
    launched: list[str] = []
    body = body_of(kind, table)
    for name in ("_load", "_accept"):
        grid = {(2,): lambda *_, name=name: launched.append(name)}
        monkeypatch.setattr(block_kernels, name, grid)
    monkeypatch.setattr(block_graphs, "ARE_USED", True)
    choices = torch.zeros(2, body.width, dtype=torch.int64)
    surprisals = torch.zeros(2, kind.size, dtype=torch.int64)
    monkeypatch.setattr(block_graphs, "_greedy", lambda *_: (choices, surprisals))
    hidden = torch.zeros(2 * body.width, HIDDEN)
    with Operations() as found:
        body.load(2)
        body.accept(hidden, lambda hidden: hidden)
    assert launched == ["_load", "_accept"]
    views = ("aten.slice.", "aten.t.", "aten.permute.", "aten.unbind.", "aten.view.", "aten.trans")
    assert [name for name in found.names if not name.startswith(views)] == ["aten.minimum.default"]


def test_with_many_rows_only_those_that_matter_reach_the_head(table: torch.Tensor):
    kind = BlockKind(4, Masks.EVERY)
    model, body = Model(5), body_of(kind, table)
    body.put(states(kind, 2, 1), torch.tensor([1, 2]), torch.tensor([150, 150]), 2)
    hidden = torch.randn(1000 * body.width, HIDDEN)
    body._input = body._input[:1].repeat(1000, 1)
    body._output = body._output[:1].repeat(1000, 1)
    body.accept(hidden, model.head)
    assert model.head_rows == 1000 * (2 * kind.size - 1)


def test_no_block_goes_past_its_slots(table: torch.Tensor):
    kind = BlockKind(4, Masks.LAST)
    body = body_of(kind, table)
    state = states(kind, 2, 1)._replace(starts=torch.tensor([60, 61]))
    body.put(state, torch.tensor([3, 4]), torch.tensor([50, 100]), 2)
    body.load(2)
    first, second = body.slots[: 2 * body.width].view(2, -1)
    assert first.tolist() == table[3, 50:57].tolist()
    assert second.tolist() == table[4, 61:68].tolist()


def test_a_row_with_a_nan_is_no_token(table: torch.Tensor):
    kind = BlockKind(2, Masks.LAST)
    model, body = Model(1), body_of(kind, table)
    body.put(states(kind, 2, 1), torch.tensor([1, 2]), torch.tensor([150, 150]), 2)
    before = states(kind, 2, 1)
    hidden = torch.randn(2 * body.width, HIDDEN)
    hidden[1, 0] = torch.nan
    body.load(2)
    body.accept(hidden, model.head)
    after, record = body.take(2)
    assert record[0, 0] == 0
    assert NO_TOKEN in record[0].tolist()
    assert record[1, 0] > 0
    assert int(after.starts[0]) == int(before.starts[0])


def test_sizes_of_the_graphs():
    assert graph_sizes_of(64, MAX_DRAFT_ROWS, [1, 2, 4, 256]) == [1, 2, 4, 8, 12, 16, 24, 32]
    assert graph_sizes_of(15, MAX_DRAFT_ROWS, [1, 2, 16]) == [1, 2, 4, 8, 12, 16]
