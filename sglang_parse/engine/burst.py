"""A burst: some requests draft on, a few tokens each.

Nothing is read from the device meanwhile: each step's tokens are the next one's input there. Where
the host runs ahead of the device (``DraftModel.runs_ahead``), even the burst itself is read late:

    host     launch burst n | read n up to here ---v  plan, launch n + 1 | read the rest of n ...
    device                  [ burst n ............ | ... ][ burst n + 1 ........................

The last ``STEPS_AHEAD`` steps keep the device busy while the host sees what the others wrote, plans
and launches the next burst behind them (``may_go_on``). A draft that ended in those steps has then
been drafted on in vain: what follows its end is dropped. On a CPU, where a step is over when it
returns, every token is looked at, and nobody drafts past an end.

A request leaves the burst at its budget or a stop token; its phase becomes VERIFYING then. NaN
logits end the request (``faults``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

import torch

from sglang_parse.core.block import ONE_TOKEN
from sglang_parse.core.phases import Phase
from sglang_parse.device import HostCopy, on_device
from sglang_parse.engine.batch import draft_budget, is_gone
from sglang_parse.engine.broadcast import NO_TOKEN, broadcast_tokens
from sglang_parse.engine.draft import DraftModel, Places
from sglang_parse.engine.faults import nan_rows
from sglang_parse.engine.sampling import PreparedRows, RowSampler

STEPS_AHEAD = 4
"""Steps at a burst's end that are read only when the next one has been launched: the host has about
5 ms for what takes it 1.5 to 2.5 (estimated for a 1.7B draft model)."""


@dataclass(frozen=True, slots=True)
class _Unread:
    """Some steps' tokens on their way to the host.

    Attributes:
        rows: [n] rows of the batch.
        tokens: int64 [n, steps], ``NO_TOKEN`` where logits held a NaN.
    """

    rows: Sequence[int]
    tokens: HostCopy


class LaunchedBurst(Protocol):
    """What a burst needs of the one before it."""

    def last_tokens(self, reqs: Sequence[Any]) -> torch.Tensor: ...


class Burst:
    """Some requests of a batch draft on.

    Args:
        model: the draft model.
        batch: the scheduler's batch.
        rows: the requests' rows of it.
        draft_tokens: most tokens of any draft.

    Attributes:
        plan: one token a forward.
        num_done: steps launched.
        over: rows whose drafts it has been seen to end.
    """

    plan = ONE_TOKEN

    def __init__(
        self, model: DraftModel, batch: Any, rows: Sequence[int], draft_tokens: int
    ) -> None:
        self.model = model
        self.batch = batch
        self.draft_tokens = draft_tokens
        self.sampler = RowSampler(model.draft_runner, batch)
        self.rows = tuple(rows)
        self.num_done = 0
        self.over: list[int] = []
        self._going_on = list(rows)
        self._unread: deque[_Unread] = deque()
        self._last: torch.Tensor | None = None

    @property
    def num_forwards(self) -> int:
        return self.num_done

    # -- launch -----------------------------------------------------------------

    def launch(self, num_steps: int, before: LaunchedBurst | None = None) -> None:
        """Up to ``num_steps`` more tokens for each request, unread but for what a CPU looks at.

        Args:
            before: the burst launched last, if some of it is unread.
        """
        while self.num_done < num_steps and self._going_on:
            if self.model.runs_ahead:
                wanted = max(self._budget(req) - num_drafted(req) for req in self._reqs())
                # One at least: a draft that begins with the last one's tail may be whole.
                self._launch(max(1, min(num_steps, wanted)), before)
                return
            self._launch(1, None)
            if self.num_done < num_steps:
                self.read()

    def _launch(self, num_steps: int, before: LaunchedBurst | None) -> None:
        """``num_steps`` steps, each one's tokens the next one's input on the device."""
        reqs, sampled = self._reqs(), self.sampler.prepare(self._going_on)
        lengths = [[length(req) + step for req in reqs] for step in range(num_steps)]
        places = Places.of(self.model.req_to_token, reqs, lengths)
        chosen = [_choose(sampled, self._first_logits(places, before), places.positions[0])]
        num_sent, early = 0, num_steps - max(STEPS_AHEAD, self.model.chain_len)
        while len(chosen) < num_steps:
            if not num_sent and 0 < early <= len(chosen):
                num_sent = self._send(chosen)
            chosen += self._next(sampled, places, chosen)
        self._send(chosen[num_sent:])
        self._last = chosen[-1]
        self.num_done += num_steps
        for req in reqs:
            req.parse_state.launch_draft(num_steps)

    def _first_logits(self, places: Places, before: LaunchedBurst | None) -> torch.Tensor:
        """From tokens on the device where nobody has read them; else the draft's KV catches up."""
        reqs = places.reqs
        if before is not None and any(req.parse_state.num_draft_inflight for req in reqs):
            return self.model.step(places, 0, before.last_tokens(reqs))
        return self.model.write_up_to(reqs, [length(req) for req in reqs])

    def _next(
        self, sampled: PreparedRows, places: Places, chosen: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """The tokens of one step more, or of a whole chain where one can be run."""
        ids, step = chosen[-1].clamp(min=0), len(chosen)
        if sampled.is_argmax and self.model.chain_fits(places, step):
            return self.model.run_chain(places, step, ids).unbind(1)
        logits = self.model.step(places, step, ids)
        return [_choose(sampled, logits, places.positions[step])]

    def _send(self, chosen: Sequence[torch.Tensor]) -> int:
        """They are on their way to the host; how many steps they are."""
        tokens = HostCopy(torch.stack([*chosen], dim=1))
        self._unread.append(_Unread(tuple(self._going_on), tokens))
        return len(chosen)

    # -- read -------------------------------------------------------------------

    def read(self, *, leave: int = 0) -> None:
        """Wait for its tokens, but for the last ``leave`` pieces; they join their drafts."""
        while len(self._unread) > leave:
            piece = self._unread.popleft()
            for row, tokens in zip(piece.rows, piece.tokens.tolist(), strict=True):
                if not is_gone(self.batch.reqs[row]):
                    self._keep(row, tokens)
        self._going_on = [row for row in self._going_on if self._drafts(row)]

    def _keep(self, row: int, tokens: Sequence[int]) -> None:
        """Up to the first that could not be computed, and to the draft's end."""
        state = self.batch.reqs[row].parse_state
        was_drafting = state.phase is Phase.DRAFTING
        sound = list(takewhile(lambda token: token != NO_TOKEN, tokens))
        state.read_draft(sound, len(tokens), self._budget(self.batch.reqs[row]))
        if was_drafting and state.phase is Phase.VERIFYING:
            self.over.append(row)

    # -- the next one -----------------------------------------------------------

    def may_go_on(self, reqs: Sequence[Any]) -> bool:
        """Whether all of ``reqs`` surely draft on behind it; waits for all but its last steps."""
        if not self.model.runs_ahead:
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
        """int64 [len(reqs)], on the device: the last token of each; 0 in place of ``NO_TOKEN``."""
        assert self._last is not None
        last = self._last.clamp(min=0)
        places = {id(self.batch.reqs[row]): i for i, row in enumerate(self.rows)}
        index = [places[id(req)] for req in reqs]
        return last if index == [*range(len(last))] else last[on_device(index, last.device)]

    # -- how --------------------------------------------------------------------

    def _reqs(self) -> list[Any]:
        return [self.batch.reqs[row] for row in self._going_on]

    def _budget(self, req: Any) -> int:
        return draft_budget(req, self.draft_tokens)

    def _drafts(self, row: int) -> bool:
        req = self.batch.reqs[row]
        return not is_gone(req) and is_drafting(req)


def is_drafting(req: Any) -> bool:
    return req.parse_state.phase is Phase.DRAFTING and not req.parse_state.fault


def num_drafted(req: Any) -> int:
    """Draft tokens it has, those that nobody has read included."""
    return req.parse_state.num_drafted + req.parse_state.num_draft_inflight


def length(req: Any) -> int:
    """Tokens of its sequence before its next draft token is chosen."""
    return req.parse_state.committed_len + 1 + num_drafted(req)


def _choose(sampled: PreparedRows, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """int64 [n] the draft's next tokens, ``NO_TOKEN`` where logits held a NaN."""
    is_bad = nan_rows(logits)
    tokens, _ = sampled.sample(logits, positions)
    return broadcast_tokens(tokens, is_bad)
