"""Simulates a server from recorded answers, stage costs and other settings, without a model.

An answer is a script of segments. Each says whether the draft's version is rejected and where in it
the target would choose another token, behind which the next draft begins. Drafts of any
length, verified at any prefixes or at every token, in chunks of any size, advance along the script
as ``engine.step`` would, and stages take their listed time. After its first rejected segment a
draft is assumed to be as long as the script.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol

from sglang_parse.core.phases import DraftKey, DraftPlan
from sglang_parse.core.policy.controller import Controller
from sglang_parse.core.round import Round
from sglang_parse.core.segment import evenly_spaced
from sglang_parse.core.stage import Stage, StageTime
from support.rounds import round_of

Cost = Callable[[float], float]
"""Size (requests, rows) -> ms."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Stage times.

    Attributes:
        draft_step: requests -> ms of one draft model forward.
        verify: rows -> ms of a target forward that verifies drafts.
        decode: requests -> ms of a target forward without drafts.
        prefill: requests -> ms.
        overhead: requests -> ms of an iteration outside all stages.
    """

    draft_step: Cost
    verify: Cost
    decode: Cost
    prefill: Cost
    overhead: Cost = lambda _: 0.0


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment of an answer.

    Attributes:
        length: its tokens.
        is_bad: the draft's version of it is rejected.
        num_matched: leading tokens of that version that match the target's choices.
        levels: the draft model's sureness of its tokens (``core.doubt``); () if not known.
    """

    length: int
    is_bad: bool
    num_matched: int
    levels: tuple[int, ...] = ()


Script = Sequence[Segment]


Outputs = Sequence[tuple[bool, int, int]]
"""Per request whether it follows a draft, its failed drafts in a row, and its output tokens."""


class Policy(Protocol):
    """Fixed settings or the controller."""

    @property
    def draft_chunk(self) -> int: ...

    def plan(self, num_running: int, num_failed: int) -> DraftPlan | None:
        """As ``Controller.plan``."""

    def limit_iteration(
        self, num_drafting: int, rows: Sequence[int], num_decoding: int, *, may_join: bool
    ) -> tuple[int, int]:
        """As ``Controller.limit_iteration``."""

    def observe(self, stages: Sequence[StageTime], outputs: Outputs) -> None:
        """Records an iteration."""

    def observe_round(self, outcome: Round, num_failed: int) -> None: ...


@dataclass
class Fixed:
    """Fixed settings; drafts always, or never."""

    draft_tokens: int = 128
    max_prefixes: int = 16
    draft_chunk: int = 16
    drafts: bool = True

    def plan(self, num_running: int, num_failed: int) -> DraftPlan | None:
        del num_running, num_failed
        plan = DraftPlan(self.draft_tokens, self.max_prefixes, self.draft_chunk)
        return plan if self.drafts else None

    def limit_iteration(
        self, num_drafting: int, rows: Sequence[int], num_decoding: int, *, may_join: bool
    ) -> tuple[int, int]:
        del num_drafting, num_decoding, may_join
        return self.draft_chunk, len(rows)

    def observe(self, stages: Sequence[StageTime], outputs: Outputs) -> None: ...

    def observe_round(self, outcome: Round, num_failed: int) -> None: ...


@dataclass
class Controlled:
    """A controller with one kind of drafts."""

    controller: Controller
    key: DraftKey = (0.5, "")
    plans: Counter[DraftPlan | None] = field(default_factory=Counter)

    def plan(self, num_running: int, num_failed: int) -> DraftPlan | None:
        self.controller.num_running = num_running
        plan = self.controller.plan(self.key, num_failed)
        self.plans[plan and replace(plan, speedup=None, doubt=None)] += 1
        return plan

    def limit_iteration(
        self, num_drafting: int, rows: Sequence[int], num_decoding: int, *, may_join: bool
    ) -> tuple[int, int]:
        return self.controller.limit_iteration(num_drafting, rows, num_decoding, may_join=may_join)

    @property
    def draft_chunk(self) -> int:
        return self.controller.limits.draft_chunk

    def observe(self, stages: Sequence[StageTime], outputs: Outputs) -> None:
        self.controller.num_running = len(outputs)
        keyed = []
        for drafts, num_failed, num_tokens in outputs:
            follows = drafts and not self.controller.rests(self.key, num_failed)
            keyed.append((self.key if follows else None, num_tokens))
        self.controller.observe(stages, keyed)

    def observe_round(self, outcome: Round, num_failed: int) -> None:
        self.controller.observe_round(self.key, outcome, num_failed)


@dataclass
class Request:
    """A running request; positions are tokens of its script."""

    script: Script
    question_rows: int
    segment_ends: list[int] = field(default_factory=list)
    position: int = 0
    plan: DraftPlan | None = None
    num_drafted: int = 0
    ends: tuple[int, ...] = ()
    prefix_ends: tuple[int, ...] = ()
    decodes_to: int = 0
    is_ready: bool = False
    num_failed: int = 0
    has_waited: bool = False
    every_token: bool = False
    num_output: int = 0
    in_doubt: bool = False
    chance: float = 1.0

    def __post_init__(self) -> None:
        self.segment_ends = list(accumulate(segment.length for segment in self.script))
        self.length = self.segment_ends[-1]
        self.levels = [level for segment in self.script for level in segment.levels]

    @property
    def draft_limit(self) -> int:
        assert self.plan is not None
        return min(self.plan.draft_tokens, self.length - self.position)

    def draft_levels(self, num_drafted: int) -> list[int]:
        return self.levels[self.position : self.position + num_drafted]

    @property
    def is_drafting(self) -> bool:
        return self.plan is not None and not self.is_ready

    @property
    def verify_rows(self) -> int:
        return 1 + self.prefix_ends[-1] + len(self.prefix_ends) * self.question_rows

    def ends_of(self, num_drafted: int) -> tuple[int, ...]:
        """Segment ends in a draft that starts here; the draft's end if there are none."""
        first = bisect_right(self.segment_ends, self.position)
        last = bisect_right(self.segment_ends, self.position + num_drafted)
        ends = tuple(end - self.position for end in self.segment_ends[first:last])
        return ends or (num_drafted,)

    @property
    def ahead(self) -> Iterator[tuple[int, Segment]]:
        """Yields (start, segment) of a draft that starts here.

        Behind a token that the target chose in place of the draft's, the rest of the segment is
        accepted and matches, unless both it and the next one are rejected: a draft that is wrong
        everywhere.
        """
        first = bisect_right(self.segment_ends, self.position)
        for index in range(first, len(self.script)):
            end, segment = self.segment_ends[index], self.script[index]
            start = end - segment.length
            if start >= self.position:
                yield start, segment
                continue
            rest = end - self.position
            is_right = start + segment.num_matched < self.position
            is_right = is_right and not all(found.is_bad for found in self.script[index:][:2])
            num_matched = max(0, start + segment.num_matched - self.position)
            is_bad = segment.is_bad and not is_right
            yield self.position, Segment(rest, is_bad, rest if is_right else num_matched)

    def num_good(self) -> int:
        """Tokens before the first rejected segment, or token, of a draft that starts here."""
        bad = (
            start + segment.num_matched * self.every_token
            for start, segment in self.ahead
            if segment.is_bad
        )
        return next(bad, self.length) - self.position

    def num_matched(self, accepted_len: int) -> int:
        """Matched tokens after the first ``accepted_len`` of a draft that starts here."""
        num_matched = 0
        for start, segment in self.ahead:
            skipped = max(0, self.position + accepted_len - start)
            if skipped >= segment.length:
                continue
            num_matched += max(0, segment.num_matched - skipped)
            if segment.num_matched < segment.length:
                break
        return num_matched


class Replay:
    """One server with ``concurrency`` requests at a time, until all scripts are answered."""

    def __init__(
        self,
        scripts: Sequence[Script],
        concurrency: int,
        costs: Costs,
        policy: Policy,
        question_rows: int = 40,
        *,
        every_token: bool = False,
        cold_ms: Mapping[Stage, float] | None = None,
        graph: Callable[[int], int] = lambda _: 0,
        warm: set[tuple[Stage, int]] | None = None,
        arrive_ms: float = 0.0,
        forwards_ahead: int = 0,
    ) -> None:
        """
        Args:
            every_token: drafts are verified at every token, and the next one begins behind the
                first rejected one. Else the target decodes the rest of a rejected segment first.
            cold_ms: what the first forward of each stage and size takes beside its cost.
            graph: rows -> those of the CUDA graph that runs a verify pass; 0 without one.
            warm: what has run before; extended.
            arrive_ms: time between two requests that arrive.
            forwards_ahead: draft forwards in flight while the host looks at the one before them.
        """
        self.every_token, self._cold_ms = every_token, cold_ms or {}
        self._graph, self._warm = graph, set() if warm is None else warm
        self._arrive_ms, self._num_arrived = arrive_ms, 0
        self._forwards_ahead = forwards_ahead
        self._stages: list[StageTime] = []
        self.waiting = list(scripts)[::-1]
        self.concurrency, self.costs, self.policy = concurrency, costs, policy
        self.question_rows = question_rows
        self.running: list[Request] = []
        self.ms = self.total_cold_ms = 0.0
        self.num_tokens = 0

    def run(self) -> float:
        """Returns output tokens per second."""
        while self.waiting or self.running:
            self._admit()
            self._iterate()
            self.running = [r for r in self.running if r.position < r.length]
        return 1e3 * self.num_tokens / self.ms

    def _admit(self) -> None:
        new = []
        if not self.running:
            self.ms = max(self.ms, self._num_arrived * self._arrive_ms)
        while self.waiting and len(self.running) + len(new) < self.concurrency:
            if self.ms < self._num_arrived * self._arrive_ms:
                break
            self._num_arrived += 1
            script, rows = self.waiting.pop(), self.question_rows
            new.append(Request(script, rows, every_token=self.every_token))
        if not new:
            return
        self.ms += self.costs.prefill(len(new))
        self.running += new
        for request in new:
            self._emit(request, 1)  # the prefill's token
            self._plan(request)

    def _plan(self, request: Request) -> None:
        """Starts a draft, or lets the target decode one more token."""
        request.plan = None
        if request.position >= request.length:
            return
        request.plan = self.policy.plan(len(self.running), request.num_failed)
        request.num_drafted, request.is_ready = 0, False
        request.chance, request.in_doubt = 1.0, False

    def _iterate(self) -> None:
        self._stages = []
        kinds = [
            (r.plan is not None or r.decodes_to > r.position + 1, r.num_failed)
            for r in self.running
        ]
        for request in self.running:
            request.num_output = 0
        drafting = [r for r in self.running if r.is_drafting]
        ready = [r for r in self.running if r.is_ready]
        decoding = [r for r in self.running if r.plan is None]
        chunk = self.policy.draft_chunk
        may_join = not any(r.has_waited for r in ready)
        may_join = may_join and all(r.draft_limit - r.num_drafted <= chunk for r in drafting)
        chunk, count = self.policy.limit_iteration(
            *(len(drafting), [r.verify_rows for r in ready], len(decoding)), may_join=may_join
        )
        verified = ready[:count]
        for i, request in enumerate(ready):
            request.has_waited = i >= count
        num_running = len(self.running)
        self._spend(Stage.SCHEDULER, num_running, 0, self.costs.overhead(num_running))
        if drafting:
            self._draft(drafting, min(chunk, max(r.draft_limit - r.num_drafted for r in drafting)))
        num_rows = sum(r.verify_rows for r in verified) + len(decoding)
        if verified:
            self._spend(Stage.VERIFY, num_rows, 0, self.costs.verify(num_rows))
        elif decoding:
            self._spend(
                Stage.DECODE, len(decoding), len(decoding), self.costs.decode(len(decoding))
            )
        for request in verified:
            self._verify(request)
        for request in decoding:
            self._emit(request, 1)
            if request.position >= request.decodes_to:
                self._plan(request)
        outputs = [(*kind, r.num_output) for kind, r in zip(kinds, self.running, strict=True)]
        self.policy.observe(self._stages, outputs)

    def _draft(self, drafting: Sequence[Request], num_tokens: int) -> None:
        num_forwards, in_flight = 0, self._forwards_ahead + 1
        going = list(drafting)
        while going and num_forwards < num_tokens and in_flight:
            num_forwards += 1
            for request in going:
                self._extend(request, request.num_drafted + 1)
            going = [request for request in going if not request.is_ready]
            in_flight -= _is_in_doubt(going)
        num_forwards = min(num_tokens, num_forwards)
        if _is_in_doubt(going):
            for request in going:
                request.in_doubt = True
                self._end(request)
        count = len(drafting)
        self._spend(
            *(Stage.DRAFT, count, num_forwards, num_forwards * self.costs.draft_step(count))
        )

    def _extend(self, request: Request, num_drafted: int) -> None:
        assert request.plan is not None
        num_known, doubt = request.num_drafted, request.plan.doubt
        request.num_drafted = min(num_drafted, request.draft_limit)
        if doubt is not None:
            for level in request.draft_levels(request.num_drafted)[num_known:]:
                request.chance *= doubt.chances[level]
        if request.num_drafted == request.draft_limit:
            self._end(request)

    def _end(self, request: Request) -> None:
        assert request.plan is not None
        request.is_ready = True
        request.ends = (request.num_drafted,)
        if not self.every_token:
            request.ends = request.ends_of(request.num_drafted)
        request.prefix_ends = tuple(evenly_spaced(request.ends, request.plan.max_prefixes))

    def _verify(self, request: Request) -> None:
        start, num_drafted = request.position, request.num_drafted
        num_verified = request.prefix_ends[-1]
        good = request.num_good()
        accepted_len = max((end for end in request.prefix_ends if end <= good), default=0)
        if self.every_token:
            accepted_len = min(good, num_drafted)
        is_finished = start + accepted_len >= request.length
        num_matched = min(request.num_matched(accepted_len), num_verified - accepted_len)
        outcome = round_of(
            num_drafted=num_drafted,
            num_verified=num_verified,
            accepted_len=accepted_len,
            reject_end=next((end for end in request.prefix_ends if end > accepted_len), None),
            is_finished=start + num_drafted >= request.length,
            num_matched=num_matched,
        )
        outcome.draft.levels = request.draft_levels(num_drafted)
        outcome.draft.in_doubt = request.in_doubt
        self.policy.observe_round(outcome, request.num_failed)
        request.num_failed = request.num_failed + 1 if outcome.has_failed else 0
        self._emit(request, accepted_len + num_matched + (not is_finished))
        request.is_ready = False
        if not self.every_token and accepted_len < num_verified:
            request.plan = None
            request.decodes_to = next(
                end for end in request.segment_ends if end > start + accepted_len
            )
            if request.position < request.decodes_to:
                return
        self._plan(request)
        if accepted_len == num_verified and request.plan is not None and not self.every_token:
            self._extend(request, max(0, num_drafted - accepted_len - 1))

    def _emit(self, request: Request, count: int) -> None:
        count = min(count, request.length - request.position)
        request.position += count
        request.num_output += count
        self.num_tokens += count

    def _spend(self, stage: Stage, size: int, num_tokens: int, ms: float) -> None:
        is_graph = stage is Stage.VERIFY and self._graph(size)
        kind = stage, self._graph(size) if is_graph else round(2 * math.log2(max(1, size)))
        if kind not in self._warm:
            self._warm.add(kind)
            self.total_cold_ms += self._cold_ms.get(stage, 0.0)
            ms += self._cold_ms.get(stage, 0.0)
        self.ms += ms
        graphs = (self._graph(size),) if stage is Stage.VERIFY else ()
        self._stages.append(StageTime(stage, size, num_tokens, ms, graphs=graphs))


def _is_in_doubt(drafting: Sequence[Request]) -> bool:
    """Whether one more token costs more than it brings, over all who draft."""
    plans = [request.plan for request in drafting]
    doubts = [plan.doubt for plan in plans if plan]
    if not doubts or None in doubts:
        return False
    least = max(doubt.least for doubt in doubts if doubt)
    return sum(request.chance for request in drafting) < least * len(drafting)
