"""A draft chunk: the draft tokens that some requests get in one iteration.

Each forward's tokens are the next one's input on the device. Where the host runs ahead of the
device, it launches all forwards of a chunk one after another, and waits for their tokens late:

    host     launch chunk n | wait for n up to here ---v  plan, launch n + 1 | wait for the rest ...
    device                  [ chunk n ................ | ... ][ chunk n + 1 ........................

The last forwards keep the device busy while the host receives the tokens of the others, plans, and
launches the next chunk (``can_follow``). A draft that ended in those last forwards has then been
drafted on in vain: tokens after its end are dropped. Elsewhere the host looks at each forward's
tokens before it launches the next one, and no draft goes past its end.

Where drafts may end in doubt (``core.doubt``), the host looks at each forward while the next one
runs, and launches no more once all drafts are over. How sure the draft model is comes with its
tokens, in the same copy and the same broadcast: all ranks decide alike.

A request leaves the chunk at its draft budget, at a stop token or in doubt; its phase becomes
VERIFYING.
NaN logits end the request (``faults``).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sglang_parse.core.block import BlockKind
from sglang_parse.core.doubt import are_in_doubt
from sglang_parse.core.phases import Phase
from sglang_parse.core.request import RequestState
from sglang_parse.core.simulation import place_of
from sglang_parse.device import HostCopy, on_device
from sglang_parse.engine.drafting.draft_model import DraftModel
from sglang_parse.engine.logits.rows import LogitsRows
from sglang_parse.engine.requests import draft_budget, is_adjusted, is_gone, tokens_left
from sglang_parse.engine.sglang_types import Req, ScheduleBatch


class DraftChunk(ABC):
    """Some requests draft on.

    Args:
        indices: the requests' indices in the batch.
        draft_tokens: most tokens of any draft.
        runs_ahead: launch all forwards before waiting for the first.
        tokens_per_forward: draft tokens that a forward adds to a draft that is not over, as far as
            known.

    Attributes:
        num_forwards: forwards launched.
        probe_tokens: most tokens of this chunk, which measures its blocks: the next one may have
            others, and waits for it. 0: no such limit.
        finished: indices of requests whose drafts it has ended, as known so far.
        made: see ``HostCopy``: of the last one; None before the first.
    """

    made: Any = None

    def __init__(
        self,
        model: DraftModel,
        kind: BlockKind,
        batch: ScheduleBatch,
        indices: Sequence[int],
        *,
        draft_tokens: int,
        runs_ahead: bool,
        tokens_per_forward: float = 0.0,
    ) -> None:
        self.model, self.kind, self.batch, self.indices = model, kind, batch, tuple(indices)
        # Half of a block, until one was seen: a kind's first chunk tells what more bring, too.
        self._tokens_per_forward = max(1.0, tokens_per_forward or kind.size / 2)
        self.num_forwards = self.probe_tokens = 0
        self.finished: list[int] = []
        self._draft_tokens, self._runs_ahead = draft_tokens, runs_ahead
        self._in_flight: deque[tuple[Sequence[int], HostCopy]] = deque()
        self._num_added = 0

    @property
    def tokens_per_request(self) -> float:
        """Draft tokens per request, as known so far."""
        return self._num_added / len(self.indices)

    @property
    def continued(self) -> tuple[float, float] | None:
        """See ``StageTime.continued``; as known so far."""
        return None

    def launch(self, num_tokens: int, before: DraftChunk | None = None) -> None:
        """Launches about ``num_tokens`` draft tokens for each request.

        Args:
            before: the chunk launched last, if the host has not waited for all of it.
        """
        size, reqs = self.kind.size, self._reqs(self.indices)
        num_tokens = min(num_tokens, self.probe_tokens or num_tokens)
        if self._runs_ahead:
            if not any(req.parse_state.num_draft_inflight for req in reqs):
                before = None
            # As many forwards as tokens are expected to take, one at least: a draft that begins
            # with a carry-over may be complete.
            num_forwards = max(self._num_forwards(req, num_tokens) for req in reqs)
            num_forwards = min(self._num_possible(req, num_forwards) for req in reqs)
            self._launch(self.indices, max(1, num_forwards), before)
            return
        ends = {i: num_drafted(self.batch.reqs[i]) + num_tokens for i in self.indices}

        def below(margin: int) -> dict[int, int]:
            """Tokens to go of the requests that are further than ``margin`` from their end."""
            drafting = [i for i in ends if self._drafts(i)]
            to_go = {i: ends[i] - num_drafted(self.batch.reqs[i]) for i in drafting}
            return {i: count for i, count in to_go.items() if count > margin}

        while to_go := below(0):
            might_go_on = below(size)
            self._launch([*to_go], 1 if size > 1 else self._until_one_ends(to_go), None)
            if self.model.runs_ahead and not might_go_on:
                return  # the others go on in the next chunk, better than a wait here
            self.wait()

    def _num_forwards(self, req: Req, num_tokens: int) -> int:
        """Forwards that so many tokens of a draft are expected to take, or its rest. A draft's
        first one has no candidates, so it adds one token."""
        wanted = min(num_tokens, self._budget(req) - num_drafted(req))
        is_first = not num_drafted(req) and not req.parse_state.draft.candidates
        return is_first + math.ceil((wanted - is_first) / self._tokens_per_forward)

    def _until_one_ends(self, to_go: Mapping[int, int]) -> int:
        """Tokens until the first request reaches its draft budget, or its part of the chunk."""
        reqs = self.batch.reqs
        return min(min(n, self._budget(reqs[r]) - num_drafted(reqs[r])) for r, n in to_go.items())

    def wait(self, *, leave: int = 0) -> None:
        """Waits for its tokens, but for the last ``leave`` copies, and adds them to the drafts,
        which may end in doubt once all have come."""
        if len(self._in_flight) <= leave:
            return
        while len(self._in_flight) > leave:
            indices, copy = self._in_flight.popleft()
            for i, values in zip(indices, copy.tolist(), strict=True):
                if not is_gone(self.batch.reqs[i]):
                    self._add(i, values)
        if not self._in_flight and self._are_in_doubt():
            for i in filter(self._drafts, self.indices):
                self.batch.reqs[i].parse_state.doubt_draft()
                self.finished.append(i)

    def _looks(self, reqs: Sequence[Req]) -> bool:
        """Whether the host looks at each forward's tokens: always where it does not run ahead, and
        where drafts may end in doubt."""
        plans = [req.parse_state.plan for req in reqs]
        return not self._runs_ahead or any(plan is not None and plan.doubt for plan in plans)

    def _goes_on(self, reqs: Sequence[Req], before: DraftChunk | None) -> bool:
        """Whether another forward of ``reqs`` is worth it, as far as known; one runs meanwhile
        where the host runs ahead."""
        if before is not None:
            before.wait()  # its tokens come first
        self.wait(leave=int(self._runs_ahead))
        if not self._runs_ahead:  # the others go on without those that are over
            return all(map(is_drafting, reqs))
        return any(map(is_drafting, reqs)) and not self._are_in_doubt()

    def _are_in_doubt(self) -> bool:
        states = [self.batch.reqs[i].parse_state for i in self.indices if self._drafts(i)]
        return are_in_doubt([(one.draft.chance, one.plan and one.plan.doubt) for one in states])

    def can_follow(self, reqs: Sequence[Req]) -> bool:
        """Whether a chunk of ``reqs`` may be launched before the end of this one is known, because
        all of them will keep drafting; waits for all but its last forwards."""
        if not self._runs_ahead or self.probe_tokens:
            return False
        members = {id(req) for req in self._reqs(self.indices)}
        # Adjustments begin with tokens that the host knows.
        if any(id(req) not in members or is_adjusted(req) for req in reqs):
            return False
        self.wait(leave=1)
        go_on = all(
            is_drafting(req) and num_drafted(req) < self._budget(req) and not is_gone(req)
            for req in reqs
        )
        return go_on and not self._are_in_doubt()

    def ends(self, reqs: Sequence[Req], *, is_sure: bool) -> bool:
        """Whether the drafts of all of ``reqs`` end with this chunk, as far as is known before;
        waits for all but its last forwards.

        Args:
            is_sure: each of these adds one token, as it does at least, not what is expected.
        """
        members = {id(req) for req in self._reqs(self.indices)}
        if not self._runs_ahead or any(id(req) not in members for req in reqs):
            return False
        self.wait(leave=1)
        num_more = self._num_in_flight * (1.0 if is_sure else self._tokens_per_forward)
        for req in reqs:
            state = req.parse_state
            is_over = state.phase is Phase.VERIFYING and not state.fault
            is_last = is_drafting(req) and state.num_drafted + num_more >= self._budget(req)
            if is_gone(req) or not (is_over or is_last):
                return False
        return True

    def num_ahead(self, req: Req, num_candidates: int) -> int:
        """Tokens of the request in a pass that is launched before this chunk's end is known;
        ``num_candidates``: of them behind a draft of full length."""
        size, num_drafted = self.kind.size, req.parse_state.num_drafted
        longest = num_drafted + self._num_in_flight * size + size - 1
        return min(longest, self._budget(req) + num_candidates, tokens_left(req))

    def ids_in_flight(self, reqs: Sequence[Req]) -> torch.Tensor:
        """int64 [len(reqs), width] the tokens in flight of some of its requests, on the device, and
        what may follow, behind those that the host has."""
        steps = torch.cat([copy.tensor for _, copy in self._in_flight], 1)
        return self._ids(steps[on_device(self.places(reqs), steps.device)], reqs)

    @property
    def _num_in_flight(self) -> int:
        """Forwards whose tokens the host does not have."""
        return sum(copy.tensor.shape[1] for _, copy in self._in_flight)

    def places(self, reqs: Sequence[Req]) -> list[int]:
        """[len(reqs)] index of each request among ``indices``."""
        places = {id(req): place for place, req in enumerate(self._reqs(self.indices))}
        return [places[id(req)] for req in reqs]

    # -- variants ---------------------------------------------------------------

    @abstractmethod
    def _launch(self, indices: Sequence[int], num_forwards: int, before: DraftChunk | None) -> None:
        """Launches forwards for ``indices`` and sends their tokens; fewer, where ``_goes_on`` says
        so.

        Args:
            before: the chunk whose tokens in flight they continue; None if the host knows all.
        """

    @abstractmethod
    def _receive(self, req: Req, values: Sequence[Any], budget: int) -> None:
        """Adds what arrived of one request to its draft."""

    @abstractmethod
    def _ids(self, steps: torch.Tensor, reqs: Sequence[Req]) -> torch.Tensor:
        """``ids_in_flight`` of what was sent of some requests, [len(reqs), forwards, ...]."""

    def _num_possible(self, req: Req, num_forwards: int) -> int:
        """Those of ``num_forwards`` that its KV slots hold, whatever each of them adds."""
        del req
        return num_forwards

    # -- helpers ----------------------------------------------------------------

    def _send(self, indices: Sequence[int], steps: Sequence[torch.Tensor]) -> None:
        """Starts a copy of steps, [len(indices), ...] each, to the host."""
        for req in self._reqs(indices):
            req.parse_state.launch_draft(self.kind.size * len(steps))
        copy = HostCopy(torch.stack([*steps], dim=1))
        self._in_flight.append((tuple(indices), copy))
        self.made = copy.made

    def _add(self, i: int, values: Sequence[Any]) -> None:
        state: RequestState = self.batch.reqs[i].parse_state
        was_drafting, count = state.phase is Phase.DRAFTING, state.num_drafted
        self._receive(self.batch.reqs[i], values, self._budget(self.batch.reqs[i]))
        self._num_added += state.num_drafted - count
        if was_drafting and state.phase is Phase.VERIFYING:
            self.finished.append(i)

    def _levels(self, req: Req, known: Sequence[int]) -> Sequence[int]:
        """Levels of a request's next draft tokens: the draft model's, or simulated."""
        if self.model.simulated is None:
            return known
        place = place_of(req.origin_input_ids, len(req.parse_state.output_ids))
        return self.model.simulated.levels(place + req.parse_state.num_drafted, known)

    def _reqs(self, indices: Sequence[int]) -> list[Req]:
        return [self.batch.reqs[i] for i in indices]

    def _budget(self, req: Req) -> int:
        return draft_budget(req, self._draft_tokens)

    def _drafts(self, i: int) -> bool:
        req = self.batch.reqs[i]
        return is_drafting(req) and not is_gone(req)


def is_drafting(req: Req) -> bool:
    return req.parse_state.phase is Phase.DRAFTING and not req.parse_state.fault


def adjusted_rows(
    reqs: Sequence[Req], count: int = 1, *, num_known: Sequence[int] | None = None
) -> list[LogitsRows]:
    """Rows of the adjusted ones of ``reqs`` in logits with ``count`` rows for each.

    Args:
        num_known: [len(reqs)] leading rows whose next token is known; rows after the next one
            follow the draft's candidates. None: there are no candidates.
    """
    rows = []
    for place, req in enumerate(reqs):
        if is_adjusted(req):
            draft, output_ids = req.parse_state.draft, req.parse_state.output_ids
            after = [*draft.token_ids, *(draft.candidates if num_known is not None else ())]
            known = num_known[place] if num_known is not None else 0
            start, num_drafted = place * count + known, len(draft.token_ids)
            part = LogitsRows(req, start, count - known, output_ids, after, num_drafted)
            rows.append(part)
    return rows


def num_drafted(req: Req) -> int:
    """Its draft tokens, those in flight included."""
    return req.parse_state.num_drafted + req.parse_state.num_draft_inflight


def length(req: Req) -> int:
    """Tokens of its sequence before its next draft token."""
    return req.parse_state.committed_len + 1 + num_drafted(req)
