"""At start: is a forward as one CUDA graph right on this GPU, and faster than in pieces?

The graphs' attention is their own, whatever the model's backend, head dimension and dtypes, and not
all of these ran on a GPU of ours. So each kind of graph runs both ways, with the same random rows
behind the same random context. One that differs, or is slower, is off: these forwards run in
pieces.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, TypeVar

import torch

from sglang_parse.core.layout import RequestLayout
from sglang_parse.core.phases import RequestPolicy
from sglang_parse.core.request import RequestState
from sglang_parse.device import on_device
from sglang_parse.engine.batch import max_forward_rows
from sglang_parse.engine.broadcast import broadcast_object
from sglang_parse.engine.drafting.parallel import both_ways
from sglang_parse.engine.forward import RequestRows, run_forward
from sglang_parse.engine.parts import Engine
from sglang_parse.engine.pass_graphs import PassGraphs, is_forced
from sglang_parse.engine.requests import sequence_slice
from sglang_parse.engine.sglang_types import ScheduleBatch
from sglang_parse.engine.step_graphs import StepGraphs

logger = logging.getLogger(__name__)

CONTEXT = 517
"""Tokens before the rows: some parts of a split context, and no whole page."""
LOOKAHEAD = 128
"""Slots for the rows of a block."""
TIMED = 3
"""Runs of each way, of which the fastest counts."""
TOLERANCE = {torch.float32: 0.02, torch.float16: 0.05, torch.bfloat16: 0.15}
"""By how much a row of logits, or of captured hidden states, may differ, relative to its length
(L2): some ten times what another order of sums makes of dozens of layers in that dtype. What a
graph chooses must lack no more than this part of the best logit, above the row's mean."""
DIFFERENT, SLOWER = "differs from forwards", "is slower than forwards"
LOGITS_ROWS = 64
"""Rows of a request with logits, at most."""
Rows = tuple[torch.Tensor, ...]
"""[rows, vocab] logits of a forward, and [rows, ...] what else is to be compared."""
Run = Callable[[], Rows]
AnyGraphs = TypeVar("AnyGraphs", PassGraphs, StepGraphs)


@dataclass(frozen=True, slots=True)
class GraphCheck:
    """How a graph compares with pieces.

    Attributes:
        error, regret: the largest difference of a row, and of a choice, see ``TOLERANCE``.
        ms, pieces_ms: of one forward.
    """

    error: float
    regret: float
    ms: float
    pieces_ms: float

    def fault(self, dtype: torch.dtype) -> str:
        """Why its forwards had better run in pieces; "" if not."""
        limit = TOLERANCE[dtype]
        if not (self.error <= limit and self.regret <= limit):  # also of a NaN
            return DIFFERENT
        return SLOWER if self.ms > self.pieces_ms else ""

    def __str__(self) -> str:
        text = "rows differ by %.4f, choices by %.4f; %.2f ms, in pieces %.2f"
        return text % (self.error, self.regret, self.ms, self.pieces_ms)


@torch.no_grad()
def check_graphs(engine: Engine, batch: ScheduleBatch) -> None:
    """Checks each kind of graph, and switches off those that are wrong or slower, unless
    ``pass_graphs.ENV_VAR`` forces them.

    Args:
        batch: requests in free rows of ``req_to_token``.
    """
    target, drafter = engine.verifier.target, engine.drafter
    of_draft = drafter.model.prefill_graphs if drafter else ()
    graphs = [*target.pass_graphs, *target.step_graphs, *of_draft]
    most = max((one.max_rows for one in graphs), default=0)
    with _context(engine, batch, most) as (starts, room):
        check = partial(_usable, engine, batch, starts, min(room, max_forward_rows()))
        zeros = [0] * len(starts)
        # Others may have states that these requests lack.
        if target.pass_graphs or target.step_graphs:
            _verify(engine, batch, zeros, starts, [])
        target.pass_graphs = check(_verify, target.pass_graphs)
        target.step_graphs = check(_verify, target.step_graphs)
        if drafter is None:
            return
        _prefill(engine, batch, zeros, starts, [])
        drafter.model.prefill_graphs = check(_prefill, drafter.model.prefill_graphs)
        for kind, one in [*drafter.model.block_graphs.items()]:
            chunk = drafter.chunk(kind, batch, [*range(len(starts))])
            if _fault(engine, one.name, both_ways(chunk, one)):
                del drafter.model.block_graphs[kind]


def _usable(
    engine: Engine,
    batch: ScheduleBatch,
    starts: Sequence[int],
    room: int,
    forward: Callable[..., Rows],
    graphs: Sequence[AnyGraphs],
) -> list[AnyGraphs]:
    """Those of some graphs that are right, up to the rows at which they are slower."""
    others: int = len(starts) - 1
    found: list[AnyGraphs] = []
    for one in graphs:
        fault, usable = "", 0
        for rows in one.rows:
            first = max(1, min(rows - 1, room) - 3 * others)  # some padding is left
            run = partial(forward, engine, batch, starts, [first, *[3] * others])
            ways = partial(run, [one]), partial(run, [])
            if fault := _fault(engine, f"{one.name} of {rows} rows", ways):
                break
            usable = rows
        one.max_rows = 0 if fault == DIFFERENT else usable
        found += [one] if one.max_rows else []
    return found


def _fault(engine: Engine, name: str, ways: tuple[Run, Run]) -> str:
    """Runs both ways, as a graph and in pieces; what the first rank finds counts. Returns why the
    graph is off; "" if it is not."""
    (found, ms), (expected, pieces_ms) = (_timed(engine, way) for way in ways)
    errors = torch.tensor([_error(*pair) for pair in zip(found, expected, strict=True)])
    one = GraphCheck(float(errors.max()), _regret(found[0], expected[0]), ms, pieces_ms)
    fault = broadcast_object(one.fault(engine.verifier.target.runner.dtype))
    is_off = bool(fault) and not is_forced()
    engine.counters.graphs[name] = 0.0 if is_off else pieces_ms / ms
    if fault:
        text = "PARSE: %s CUDA graph of the %s: it %s in pieces: %s"
        logger.warning(text, "no" if is_off else "forced", name, fault, one)
    return fault if is_off else ""


def _timed(engine: Engine, run: Run) -> tuple[Rows, float]:
    """What a forward brings, and the ms of its fastest run."""
    times, found = [], run()  # its kernels may be cold
    for _ in range(TIMED):
        with engine.timer.start() as watch:
            found = run()
        torch.get_device_module(found[0].device).synchronize()
        times.append(watch.ms or 0.0)
    return tuple(part.to(torch.float32, copy=True) for part in found), min(times)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative difference of a row; NaN of a NaN."""
    scale = expected.norm(dim=-1).clamp(min=1e-6)
    return float(((found - expected).norm(dim=-1) / scale).max())


def _regret(found: torch.Tensor, expected: torch.Tensor) -> float:
    """By how much, of the best logit above the mean, the worst choice of ``found`` lacks."""
    best, chosen = expected.max(-1).values, found.argmax(-1, keepdim=True)
    lacks = best - expected.gather(-1, chosen)[..., 0]
    return float((lacks / (best - expected.mean(-1)).clamp(min=1e-6)).max())


# -- forwards -------------------------------------------------------------------


def _verify(
    engine: Engine,
    batch: ScheduleBatch,
    starts: Sequence[int],
    counts: Sequence[int],
    graphs: Sequence[Any],
) -> Rows:
    """A pass over ``counts`` tokens of each request behind ``starts``, with these graphs only, of
    the kind that the target has."""
    target, parts = copy(engine.verifier.target), []
    if target.step_graphs:
        captures, target.step_graphs = engine.config.captures_hidden_states, graphs
    else:
        captures = any(len(one.states) > 1 for one in target.pass_graphs)
        target.pass_graphs = graphs
    for i, (start, count) in enumerate(zip(starts, counts, strict=True)):
        ids = sequence_slice(batch.reqs[i], start, start + count)
        rows = range(count)[:: -(-count // LOGITS_ROWS)]
        layout = RequestLayout(prefix_len=start, num_draft_rows=count)
        parts.append(RequestRows(i, layout, ids, tuple(rows), len(rows)))
    output = run_forward(target, batch, parts, is_masked=False, capture=captures)
    return (output.logits,) if output.hidden is None else (output.logits, output.hidden)


def _prefill(
    engine: Engine,
    batch: ScheduleBatch,
    starts: Sequence[int],
    counts: Sequence[int],
    graphs: Sequence[PassGraphs],
) -> Rows:
    """The draft model's prefill of these tokens with these graphs only: the last rows' logits."""
    assert engine.drafter is not None
    model, ends = copy(engine.drafter.model), [*map(sum, zip(starts, counts, strict=True))]
    model.prefill_graphs = graphs
    return (model.extend(batch.reqs, starts, ends),)


@contextmanager
def _context(
    engine: Engine, batch: ScheduleBatch, num_rows: int
) -> Iterator[tuple[list[int], int]]:
    """While it lasts, the requests have random tokens, and KV slots of their own for ``num_rows``
    rows at most; yields the tokens before their rows, and most rows."""
    runner = engine.verifier.target.runner
    allocator, table = runner.token_to_kv_pool_allocator, batch.req_to_token_pool.req_to_token
    page, config, drawn = allocator.page_size, runner.model_config, Random(0)
    longest = min(CONTEXT + num_rows + LOOKAHEAD, config.context_len, table.shape[1])
    longest = min(longest, allocator.available_size() // len(batch.reqs)) // page * page
    slots = _alloc(allocator, len(batch.reqs), longest, runner.device)
    rows = [req.kv.req_pool_idx for req in batch.reqs]
    pages = slots.view(-1, page).flip(0)  # a slot's number tells nothing about its position
    lens = [max(1, min(CONTEXT, longest // 2) // (1 + 7 * i)) for i in range(len(rows))]
    try:
        for i, (req, row, count) in enumerate(zip(batch.reqs, rows, lens, strict=True)):
            table[row, :longest] = pages[i :: len(rows)].flatten().to(table.dtype)
            req.kv.kv_allocated_len = longest
            words = min(config.vocab_size, 1 << 15)
            req.origin_input_ids = [drawn.randrange(words) for _ in range(longest + 1)]
            req.parse_state = RequestState(
                RequestPolicy(0.5, engine.config.judge_name),
                committed=count,
                draft_kv_len=count,
                draft_kv_found=True,
            )
        yield lens, longest - lens[0] - LOOKAHEAD
    finally:
        for row in rows:
            table[row] = 0
        allocator.free(slots)


def _alloc(allocator: Any, num_reqs: int, length: int, device: Any) -> torch.Tensor:
    """int64 [num_reqs * length] KV slots in whole pages; two pools allocate these for requests
    only."""
    if allocator.page_size == 1:
        return allocator.alloc(num_reqs * length)
    starts, ends = [0] * num_reqs, [length] * num_reqs
    lens = on_device(starts, device), torch.tensor(starts), on_device(ends, device)
    none = on_device([-1] * num_reqs, device)
    return allocator.alloc_extend(*lens, torch.tensor(ends), none, num_reqs * length)
