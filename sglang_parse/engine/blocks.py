"""Bursts of a draft model that writes several tokens a forward and verifies them itself.

What a forward's rows are, and what is kept of it, is ``core.block``; which layout a burst takes
``core.plans``. A forward runs as a verification pass does: in the requests' own slots, behind what
is committed, with logits of the rows that say a token. The KV of candidates that are kept is the
draft's own; what lies behind it is overwritten by the next forward, and counted by nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import Any

import torch

from sglang_parse.core.block import ONE_TOKEN, Block, BlockPlan, Kept, Masks, block_of, keep
from sglang_parse.core.phases import Phase
from sglang_parse.core.plans import PlanChoice, plans_for
from sglang_parse.core.request import NAN_IN_DRAFT, RequestState
from sglang_parse.device import HostCopy, on_device
from sglang_parse.engine.batch import draft_budget, is_gone, sequence_slice
from sglang_parse.engine.burst import Burst, LaunchedBurst
from sglang_parse.engine.draft import DraftModel
from sglang_parse.engine.faults import nan_rows
from sglang_parse.engine.forward import forward_spans, run_pass
from sglang_parse.engine.ranks import share_choices
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
        or_one: also write one token a forward where that is faster.
        is_masked: forwards with masks behind every row run in the layout ``mask``, otherwise in
            ``alias``.
        draft_tokens: most tokens of any draft.
    """

    def __init__(
        self,
        model: DraftModel,
        *,
        size: int,
        mask_id: int,
        or_one: bool,
        is_masked: bool,
        draft_tokens: int,
    ) -> None:
        self.model, self.mask_id, self.is_masked = model, mask_id, is_masked
        self.draft_tokens = draft_tokens
        self.choice = PlanChoice(plans_for(size, or_one=or_one))
        self._told: BlockPlan | None = None
        self._tell_from = 0

    def burst(self, batch: Any, rows: Sequence[int]) -> Burst | BlockBurst:
        """The next burst, of the requests ``rows`` of the batch."""
        is_unread = any(batch.reqs[row].parse_state.num_draft_unread for row in rows)
        # Behind tokens that only the device has there is no block.
        plan = ONE_TOKEN if is_unread else self.choice.choose(len(rows))
        self._tell(len(rows))
        if plan.masks is Masks.NONE:
            return Burst(self.model, batch, rows, self.draft_tokens)
        return BlockBurst(self, plan, batch, rows)

    def _tell(self, num_requests: int) -> None:
        """Say which plan is taken and why, when that has changed; not for every flicker."""
        choice = self.choice
        is_new = choice.taken != self._told and choice.num_bursts >= self._tell_from
        if choice.taken is not None and is_new and len(choice.prices) > 1:
            self._told, self._tell_from = choice.taken, choice.num_bursts + TELL_EVERY
            logger.info(
                "PARSE: drafts are written %s. With %d requests: %s",
                *(choice.taken, num_requests, choice.told(num_requests)),
            )


class BlockBurst:
    """Some requests draft on, block by block; each is read before the next is launched.

    A request leaves the burst when it has kept the burst's tokens (the block that brings the last
    of them is kept whole), at its budget or a stop token; its phase becomes VERIFYING then.
    Candidates stay with it for the next burst. NaN logits end it (``faults``).

    Attributes:
        plan: how its forwards are laid out.
        rows: the requests' rows of the batch.
        num_forwards: made so far.
        over: rows whose drafts it has been seen to end.
    """

    def __init__(self, bursts: Bursts, plan: BlockPlan, batch: Any, rows: Sequence[int]) -> None:
        self.plan, self.batch, self.rows = plan, batch, tuple(rows)
        self.num_forwards = 0
        self.over: list[int] = []
        self._bursts, self._model = bursts, bursts.model
        self._sampler = RowSampler(self._model.draft_runner, batch)
        self._num_before = {row: batch.reqs[row].parse_state.num_drafted for row in rows}
        self._going_on = list(rows)
        self._unread: _LaunchedBlocks | None = None
        self._num_kept = 0

    @property
    def num_done(self) -> float:
        """Tokens kept, per request."""
        return self._num_kept / len(self.rows)

    def launch(self, num_tokens: int, before: LaunchedBurst | None = None) -> None:
        """``num_tokens`` more for each request, or a few more; the last block may stay unread."""
        del before  # it has been read
        while True:
            self.read()
            self._going_on = [row for row in self._going_on if self._wants(row, num_tokens)]
            if not self._going_on:
                return
            self._unread = self._launch()
            self.num_forwards += 1
            if self._may_be_last(num_tokens):
                return

    def read(self) -> None:
        """Wait for the last block; what it keeps joins the requests' drafts."""
        unread, self._unread = self._unread, None
        if unread is not None:
            for row, kept in unread.read():
                if not is_gone(self.batch.reqs[row]):
                    self._keep(row, kept)

    def may_go_on(self, reqs: Sequence[Any]) -> bool:
        """Whether the next burst may be launched before this one is read: where it stands is what
        this one kept."""
        del reqs
        return False

    def last_tokens(self, reqs: Sequence[Any]) -> torch.Tensor:
        """Never asked for: nothing is launched behind a block that nobody has read."""
        raise NotImplementedError

    def _wants(self, row: int, num_tokens: int) -> bool:
        req = self.batch.reqs[row]
        state: RequestState = req.parse_state
        if is_gone(req) or state.fault or state.phase is not Phase.DRAFTING:
            return False
        return state.num_drafted - self._num_before[row] < num_tokens

    def _may_be_last(self, num_tokens: int) -> bool:
        """Whether every request may be done with the block under way.

        Those that are not go on in the next burst: better than that the host waits here.
        """
        if not self._model.runs_ahead:
            return False
        return not any(self._wants(row, num_tokens - self.plan.size + 1) for row in self._going_on)

    def _keep(self, row: int, kept: Kept) -> None:
        req = self.batch.reqs[row]
        state: RequestState = req.parse_state
        if kept.is_faulty:
            state.fail(NAN_IN_DRAFT)
            return
        before = state.num_drafted
        state.extend_draft_by_block(kept.token_ids, self._budget(req), kept.candidates)
        self._num_kept += state.num_drafted - before
        if state.phase is Phase.VERIFYING:
            self.over.append(row)

    def _budget(self, req: Any) -> int:
        return draft_budget(req, self._bursts.draft_tokens)

    # -- a forward --------------------------------------------------------------

    def _launch(self) -> _LaunchedBlocks:
        """One block of each request that goes on, in as many forwards as the memory asks for."""
        blocks = [self._block(row) for row in self._going_on]
        parts = [self._rows(*numbered) for numbered in zip(self._going_on, blocks, strict=True)]
        runner = self._model.draft_runner
        chosen = [self._run(parts[span]) for span in forward_spans(runner, parts)]
        return _LaunchedBlocks(self._going_on, blocks, HostCopy(torch.cat(chosen)))

    def _block(self, row: int) -> Block:
        req = self.batch.reqs[row]
        state: RequestState = req.parse_state
        known = state.committed_len + 1 + state.num_drafted
        return block_of(
            self.plan,
            written=min(state.draft_kv_len, known - 1),
            known=known,
            candidates=state.draft.candidates,
            room=self._budget(req) - state.num_drafted,
        )

    def _rows(self, row: int, block: Block) -> VerifyRows:
        req, written = self.batch.reqs[row], block.layout.prefix_len
        draft = req.parse_state.draft.token_ids
        pending = sequence_slice(req, written, written + block.num_pending, draft)
        return VerifyRows(
            row=row,
            layout=block.layout,
            token_ids=block.token_ids(pending, self._bursts.mask_id),
            logits_rows=block.logits_rows,
            num_cut_rows=block.num_real,
        )

    def _run(self, parts: Sequence[VerifyRows]) -> torch.Tensor:
        """int64 [rows with logits]: what each says, ``NO_TOKEN`` where its logits held a NaN."""
        # With masks behind the last row a forward is plainly causal.
        is_masked = self._bursts.is_masked and self.plan.masks is Masks.EVERY
        output = run_pass(self._model.draft_runner, self.batch, parts, is_masked=is_masked)
        self._model.replays = output.replays
        is_bad = nan_rows(output.logits)
        return share_choices(self._choose(parts, output.logits), is_bad)

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
    """Blocks under way.

    Args:
        rows: the requests' rows of the batch.
        blocks: theirs.
        choices: what their rows with logits said, in order.
    """

    def __init__(self, rows: Sequence[int], blocks: Sequence[Block], choices: HostCopy) -> None:
        self._rows, self._blocks, self._choices = tuple(rows), blocks, choices

    def read(self) -> Iterator[tuple[int, Kept]]:
        """(row of the batch, what its block brought); waits for them."""
        choices = iter(self._choices.tolist())
        for row, block in zip(self._rows, self._blocks, strict=True):
            yield row, keep(block, list(islice(choices, len(block.logits_rows))))
