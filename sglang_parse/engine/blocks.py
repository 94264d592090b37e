"""Bursts of a draft model that writes several tokens a forward and verifies them itself.

What a forward's rows are, and what is kept of it, is ``core.block``; which layout a burst takes
``core.policy.layout_choice``. A forward runs as a verification pass does: in the requests' own slots, behind what
is committed, with logits of the rows that say a token. The KV of candidates that are kept is the
draft's own; what lies behind it is overwritten by the next forward, and counted by nobody.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import Any

import torch

from sglang_parse.core.block import (
    Block,
    DraftLayout,
    Kept,
    Masks,
    block_of,
    keep,
    wide_rows,
)
from sglang_parse.core.block_accept import ChainState, accepted_block
from sglang_parse.core.phases import Phase
from sglang_parse.core.policy.layout_choice import DraftLayoutChoice, layouts_for
from sglang_parse.core.request import RequestState
from sglang_parse.device import HostCopy, on_device
from sglang_parse.engine.batch import draft_budget, is_gone, sequence_slice
from sglang_parse.engine.block_chain import BlockChain
from sglang_parse.engine.broadcast import broadcast_tokens
from sglang_parse.engine.burst import Burst, LaunchedBurst, is_drafting, length, num_drafted
from sglang_parse.engine.draft import DraftModel
from sglang_parse.engine.faults import nan_rows
from sglang_parse.engine.forward import forward_spans, run_pass
from sglang_parse.engine.rows import VerifyRows
from sglang_parse.engine.sampling import RowSampler

logger = logging.getLogger(__name__)

TELL_EVERY = 256
"""Bursts between two lines of the log about how they are written, at least."""


class Bursts:
    """Makes one server's bursts: of blocks, or of one token a forward.

    Args:
        model: the draft model.
        size: tokens a block.
        mask_id: the draft's mask token; not used where ``size`` is 1.
        allow_one_token: also write one token a forward where that is faster.
        is_masked: forwards with masks behind every row run in the layout ``mask``, otherwise in
            ``alias``.
        plans_on_device: whether attention plans a forward from lengths that only the device knows.
        draft_tokens: most tokens of any draft.
        is_timed: whether prices decide about the plan; else it is the first there is.
    """

    def __init__(
        self,
        model: DraftModel,
        *,
        size: int,
        mask_id: int,
        allow_one_token: bool,
        is_masked: bool,
        plans_on_device: bool,
        draft_tokens: int,
        is_timed: bool = True,
    ) -> None:
        self.model, self.mask_id, self.is_masked = model, mask_id, is_masked
        self.plans_on_device, self.draft_tokens = plans_on_device, draft_tokens
        plans = layouts_for(size, allow_one_token=allow_one_token)
        self.choice = DraftLayoutChoice(plans if is_timed else plans[:1])
        self._told: DraftLayout | None = None
        self._tell_from = 0

    def burst(
        self, batch: Any, rows: Sequence[int], before: Burst | BlockBurst | None = None
    ) -> Burst | BlockBurst:
        """The next burst, of the requests ``rows`` of the batch.

        Args:
            before: the burst launched last, if it is still unread; what follows it is of its kind.
        """
        is_unread = any(batch.reqs[row].parse_state.num_draft_inflight for row in rows)
        plan = before.plan if before and is_unread else self.choice.choose(len(rows))
        self._tell(len(rows))
        if plan.masks is Masks.NONE:
            return Burst(self.model, batch, rows, self.draft_tokens)
        return BlockBurst(self, plan, batch, rows)

    def _tell(self, num_requests: int) -> None:
        """Say which plan is taken and why, when that has changed; not for every flicker."""
        choice = self.choice
        is_new = choice.current != self._told and choice.num_choices >= self._tell_from
        if choice.current is not None and is_new and len(choice.costs) > 1:
            self._told, self._tell_from = choice.current, choice.num_choices + TELL_EVERY
            logger.info(
                "PARSE: drafts are written %s. With %d requests: %s",
                *(choice.current, num_requests, choice.describe(num_requests)),
            )


class BlockBurst:
    """Some requests draft on, block by block.

    Where the host runs ahead of the device and attention can be planned there, blocks are launched
    one behind another, as many as can bring the burst's tokens, and the next burst behind the last
    of them, which is read late (as ``burst`` has it for single tokens). Elsewhere each is read
    before the next is launched, but for the one that may be the last.

    A request leaves the burst when it has kept the burst's tokens (the block that brings the last
    of them is kept whole), at its budget or a stop token; its phase becomes VERIFYING then.
    Candidates stay with it for the next burst. NaN logits end it (``faults``).

    Attributes:
        plan: how its forwards are laid out.
        rows: the requests' rows of the batch.
        num_forwards: made so far.
        over: rows whose drafts it has been seen to end.
    """

    def __init__(self, bursts: Bursts, plan: DraftLayout, batch: Any, rows: Sequence[int]) -> None:
        self.plan, self.batch, self.rows = plan, batch, tuple(rows)
        self.num_forwards = 0
        self.over: list[int] = []
        self._bursts, self._model = bursts, bursts.model
        self._sampler = RowSampler(self._model.draft_runner, batch)
        self._num_before = {row: batch.reqs[row].parse_state.num_drafted for row in rows}
        self._going_on = list(rows)
        self._unread: deque[_LaunchedBlocks | _Chained] = deque()
        self._ahead: ChainState | None = None
        self._num_kept = 0

    @property
    def num_done(self) -> float:
        """Tokens kept, per request."""
        return self._num_kept / len(self.rows)

    def launch(self, num_tokens: int, before: LaunchedBurst | None = None) -> None:
        """``num_tokens`` more for each request, or a few more or less.

        Args:
            before: the burst launched last, if some of it is unread.
        """
        if self._runs_ahead:
            self._launch_chain(num_tokens, before)
            return
        while True:
            self.read()
            self._going_on = [row for row in self._going_on if self._wants(row, num_tokens)]
            if not self._going_on:
                return
            blocks, chosen = self._launch()
            self._unread.append(_LaunchedBlocks(self._going_on, blocks, HostCopy(chosen)))
            if self._may_be_last(num_tokens):
                return

    def read(self, *, leave: int = 0) -> None:
        """Wait for its blocks, but for the last ``leave`` pieces; what they keep joins the
        requests' drafts."""
        while len(self._unread) > leave:
            piece = self._unread.popleft()
            for row, kept in piece.read():
                if not is_gone(self.batch.reqs[row]):
                    self._keep(row, kept, piece.num_launched)

    def may_go_on(self, reqs: Sequence[Any]) -> bool:
        """Whether all of ``reqs`` surely draft on behind it; waits for all but its last block."""
        if self._ahead is None:
            return False
        drafting = {id(self.batch.reqs[row]) for row in self.rows}
        if any(id(req) not in drafting for req in reqs):
            return False
        self.read(leave=1)
        return all(
            is_drafting(req) and num_drafted(req) < self._budget(req) and not is_gone(req)
            for req in reqs
        )

    def last_tokens(self, reqs: Sequence[Any]) -> torch.Tensor:
        """Never asked for: single tokens do not follow blocks that nobody has read."""
        raise NotImplementedError

    def ahead(self, reqs: Sequence[Any]) -> ChainState:
        """Where the next blocks of ``reqs`` stand."""
        assert self._ahead is not None
        places = {id(self.batch.reqs[row]): i for i, row in enumerate(self.rows)}
        return self._ahead.pick(on_device([places[id(req)] for req in reqs], self.batch.device))

    @property
    def _runs_ahead(self) -> bool:
        return self._model.runs_ahead and self._bursts.plans_on_device

    def _wants(self, row: int, num_tokens: int) -> bool:
        req = self.batch.reqs[row]
        if is_gone(req) or not is_drafting(req):
            return False
        return req.parse_state.num_drafted - self._num_before[row] < num_tokens

    def _may_be_last(self, num_tokens: int) -> bool:
        """Whether every request may be done with the block under way.

        Those that are not go on in the next burst: better than that the host waits here.
        """
        if not self._model.runs_ahead:
            return False
        return not any(self._wants(row, num_tokens - self.plan.size) for row in self._going_on)

    def _keep(self, row: int, kept: Kept, num_launched: int) -> None:
        state: RequestState = self.batch.reqs[row].parse_state
        was_drafting, before = state.phase is Phase.DRAFTING, state.num_drafted
        state.read_block(kept, num_launched, self._budget(self.batch.reqs[row]))
        self._num_kept += state.num_drafted - before
        if was_drafting and state.phase is Phase.VERIFYING:
            self.over.append(row)

    def _budget(self, req: Any) -> int:
        return draft_budget(req, self._bursts.draft_tokens)

    # -- one behind another -----------------------------------------------------

    def _launch_chain(self, num_tokens: int, before: LaunchedBurst | None) -> None:
        """As many blocks as can bring ``num_tokens``, or the longest budget; none is read."""
        size, reqs = self.plan.size, [self.batch.reqs[row] for row in self.rows]
        wanted = max(self._budget(req) - num_drafted(req) for req in reqs)
        num_blocks = max(1, -(-min(num_tokens, wanted) // size))
        chain = BlockChain(
            self._model,
            self.plan,
            self._bursts.mask_id,
            is_masked=self._bursts.is_masked,
            sampler=self._sampler,
            rows=self.rows,
        )
        starts = [length(req) - 1 for req in reqs]
        if isinstance(before, BlockBurst) and any(r.parse_state.num_draft_inflight for r in reqs):
            ahead, records = before.ahead(reqs), []
        else:
            ahead, record = self._first(chain)
            records = [record]
        while len(records) < num_blocks:
            if records and len(records) == num_blocks - 1:
                self._send(records)
            longest = [start + size * len(records) for start in starts]
            ahead, record = chain.launch(ahead, longest)
            records.append(record)
            self.num_forwards += 1
        self._send(records[-1:])
        self._ahead = ahead
        for req in reqs:
            req.parse_state.launch_draft(size * num_blocks)

    def _first(self, chain: BlockChain) -> tuple[ChainState, torch.Tensor]:
        """The block of which the host knows all: it brings tokens without KV along."""
        blocks, chosen = self._launch()
        num_masks, mask_id, first = self.plan.size - 1, self._bursts.mask_id, 0
        known: list[list[int]] = []
        for row, block in zip(self.rows, blocks, strict=True):
            start, num_candidates = length(self.batch.reqs[row]) - 1, len(block.candidates)
            (last,) = self._tokens(row, start, start + 1)
            padded = [*block.candidates, *[mask_id] * (num_masks - num_candidates)]
            wide = [first + place for place in wide_rows(self.plan, block)]
            known.append([start, last, num_candidates, *padded, *wide])
            first += len(block.logits_rows)
        sent = on_device(known, chosen.device)
        candidates, wide_index = sent[:, 3 : 3 + num_masks], sent[:, 3 + num_masks :]
        ahead = ChainState(sent[:, 0], sent[:, 1], candidates, sent[:, 2])
        return chain.keep(ahead, chosen[wide_index])

    def _send(self, records: Sequence[torch.Tensor]) -> None:
        """They are on their way to the host."""
        copied = HostCopy(torch.stack([*records], dim=1))
        self._unread.append(_Chained(self.rows, self.plan.size, copied))

    # -- a forward --------------------------------------------------------------

    def _launch(self) -> tuple[list[Block], torch.Tensor]:
        """One block of each request that goes on, in as many forwards as the memory asks for; and
        int64 [rows with logits] what they choose."""
        blocks = [self._block(row) for row in self._going_on]
        parts = [self._rows(*numbered) for numbered in zip(self._going_on, blocks, strict=True)]
        runner = self._model.draft_runner
        chosen = [self._run(parts[span]) for span in forward_spans(runner, parts)]
        self.num_forwards += 1
        spans = [
            (self.batch.reqs[row], start := block.layout.prefix_len, start + block.num_pending)
            for row, block in zip(self._going_on, blocks, strict=True)
        ]
        self._model.kv.mark_read(spans)
        return blocks, torch.cat(chosen)

    def _block(self, row: int) -> Block:
        req = self.batch.reqs[row]
        state: RequestState = req.parse_state
        known = length(req)
        return block_of(
            self.plan,
            written=min(state.draft_kv_len, known - 1),
            known=known,
            candidates=state.draft.candidates,
            room=self._budget(req) - state.num_drafted,
        )

    def _rows(self, row: int, block: Block) -> VerifyRows:
        written = block.layout.prefix_len
        pending = self._tokens(row, written, written + block.num_pending)
        return VerifyRows(
            row=row,
            layout=block.layout,
            token_ids=block.token_ids(pending, self._bursts.mask_id),
            logits_rows=block.logits_rows,
            num_cut_rows=block.num_real,
        )

    def _tokens(self, row: int, start: int, end: int) -> list[int]:
        req = self.batch.reqs[row]
        return sequence_slice(req, start, end, req.parse_state.draft.token_ids)

    def _run(self, parts: Sequence[VerifyRows]) -> torch.Tensor:
        """int64 [rows with logits]: what each says, ``NO_TOKEN`` where its logits held a NaN."""
        is_masked, runner = self._bursts.is_masked, self._model.draft_runner
        output = run_pass(runner, self.batch, parts, is_masked=is_masked)
        self._model.replays = output.replays
        is_bad = nan_rows(output.logits)
        return broadcast_tokens(self._choose(parts, output.logits), is_bad)

    def _choose(self, parts: Sequence[VerifyRows], logits: torch.Tensor) -> torch.Tensor:
        """Real rows draw as the model does one token at a time. A mask's guess is free: its most
        likely token, or under a seed, whose noise goes by the position, the same draw."""
        if all(self._sampler.is_argmax(part.row) for part in parts):
            return logits.argmax(dim=-1)
        requests = [part.row for part in parts for _ in part.logits_rows]
        positions = on_device(_positions(parts), logits.device)
        if self.batch.sampling_info.sampling_seed is not None:
            return self._sampler.sample(logits, requests, positions)[0]
        tokens = logits.argmax(dim=-1)
        places = _real_places(parts)
        real = on_device(places, logits.device)
        drawn, _ = self._sampler.sample(
            logits[real], [requests[place] for place in places], positions[real]
        )
        tokens[real] = drawn
        return tokens


def _positions(parts: Sequence[VerifyRows]) -> list[int]:
    """Positions of the rows with logits."""
    positions: list[int] = []
    for part in parts:
        of_rows = part.layout.positions()
        positions.extend(of_rows[row] for row in part.logits_rows)
    return positions


def _real_places(parts: Sequence[VerifyRows]) -> list[int]:
    """Which of the rows with logits are real rows."""
    starts = accumulate((len(part.logits_rows) for part in parts), initial=0)
    return [
        start + place
        for start, part in zip(starts, parts, strict=False)
        for place in range(part.num_cut_rows)
    ]


class _LaunchedBlocks:
    """Blocks under way, laid out by the host.

    Args:
        rows: the requests' rows of the batch.
        blocks: theirs.
        choices: what their rows with logits said, in order.
    """

    num_launched = 0

    def __init__(self, rows: Sequence[int], blocks: Sequence[Block], choices: HostCopy) -> None:
        self._rows, self._blocks, self._choices = tuple(rows), blocks, choices

    def read(self) -> Iterator[tuple[int, Kept]]:
        """(row of the batch, what its block brought); waits for them."""
        choices = iter(self._choices.tolist())
        for row, block in zip(self._rows, self._blocks, strict=True):
            yield row, keep(block, list(islice(choices, len(block.logits_rows))))


class _Chained:
    """Blocks under way, one behind another.

    Args:
        rows: [n] the requests' rows of the batch.
        num_launched: tokens that a block can bring.
        records: [n, blocks, ...] what was kept of them (``accepted_block``).
    """

    def __init__(self, rows: Sequence[int], num_launched: int, records: HostCopy) -> None:
        self._rows, self.num_launched, self._records = rows, num_launched, records

    def read(self) -> Iterator[tuple[int, Kept]]:
        """As ``_LaunchedBlocks.read``; each request's blocks in order."""
        for row, blocks in zip(self._rows, self._records.tolist(), strict=True):
            for record in blocks:
                yield row, accepted_block(record)
