"""Servers replayed: what the engine would do with recorded answers, prices and other settings.

No model runs. An answer is a script: its segments, each with whether the draft's version of it is
rejected (then the target writes it itself) and where in it the target would write another token.
Drafts of any length, judged at any prefixes, in bursts of any size, move along the script as
``engine.iteration`` would; stages take what a price list says. What a draft holds behind its first
rejected segment is taken to be as long as the script.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol

from sglang_parse.core.phases import DraftPlan
from sglang_parse.core.policy.acceptance import VerifyOutcome
from sglang_parse.core.policy.controller import Controller
from sglang_parse.core.policy.stage_cost import Stage, StageTime
from sglang_parse.core.policy.threshold_stats import stats_key
from sglang_parse.core.segment import evenly_spaced

Price = Callable[[float], float]
"""Size (requests, rows) -> ms."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What stages take.

    Attributes:
        draft_step: requests -> ms of one forward of the draft model.
        verify: rows -> ms of a forward of the target with drafts in it.
        step: requests -> ms of a forward of the target without.
        prefill: requests -> ms.
        overhead: requests -> ms of an iteration that no stage takes.
    """

    draft_step: Price
    verify: Price
    step: Price
    prefill: Price
    overhead: Price = lambda _: 0.0


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of an answer.

    Attributes:
        length: how many.
        is_bad: the draft's version of them is rejected.
        agreed: how many of that version's first tokens the target would write, too.
    """

    length: int
    is_bad: bool
    agreed: int


Script = Sequence[Segment]


class Policy(Protocol):
    """What decides: fixed settings, or the controller.

    Attributes:
        burst: draft tokens per iteration, at most.
    """

    @property
    def burst(self) -> int: ...

    def observe_load(self, num_running: int, resting: Sequence[int]) -> None:
        """Requests that run now; of those that rest, how often each has failed."""

    def plan(self, num_failed: int) -> DraftPlan | None:
        """A request may draft: how; None where it should not."""

    def share(
        self, num_drafting: int, rows: Sequence[int], num_stepping: int, *, may_join: bool
    ) -> tuple[int, int]:
        """As ``Controller.limit_iteration``."""

    def observe(self, *iteration: StageTime) -> None: ...

    def observe_round(self, judged: VerifyOutcome, num_failed: int) -> None: ...

    def observe_decoded_segment(self, num_tokens: int) -> None: ...


@dataclass
class Fixed:
    """Settings as flags fix them; drafting always, or never."""

    draft_tokens: int = 128
    max_prefixes: int = 16
    burst: int = 16
    drafts: bool = True

    def observe_load(self, num_running: int, resting: Sequence[int]) -> None: ...

    def plan(self, num_failed: int) -> DraftPlan | None:
        del num_failed
        return DraftPlan(self.draft_tokens, self.max_prefixes, self.burst) if self.drafts else None

    def share(
        self, num_drafting: int, rows: Sequence[int], num_stepping: int, *, may_join: bool
    ) -> tuple[int, int]:
        del num_drafting, num_stepping, may_join
        return self.burst, len(rows)

    def observe(self, *iteration: StageTime) -> None: ...

    def observe_round(self, judged: VerifyOutcome, num_failed: int) -> None: ...

    def observe_decoded_segment(self, num_tokens: int) -> None: ...


@dataclass
class Controlled:
    """A controller, asked for one threshold."""

    controller: Controller
    threshold: float = 0.5
    taken: Counter[DraftPlan | None] = field(default_factory=Counter)

    def observe_load(self, num_running: int, resting: Sequence[int]) -> None:
        keys = (stats_key(self.threshold, num_failed) for num_failed in resting)
        self.controller.observe_load(num_running, keys)

    def plan(self, num_failed: int) -> DraftPlan | None:
        plan = self.controller.plan(self.threshold, num_failed)
        self.taken[plan and replace(plan, speedup=None)] += 1
        return plan

    def share(
        self, num_drafting: int, rows: Sequence[int], num_stepping: int, *, may_join: bool
    ) -> tuple[int, int]:
        return self.controller.limit_iteration(num_drafting, rows, num_stepping, may_join=may_join)

    @property
    def burst(self) -> int:
        return self.controller.draft_chunk

    def observe(self, *iteration: StageTime) -> None:
        self.controller.observe(iteration)

    def observe_round(self, judged: VerifyOutcome, num_failed: int) -> None:
        self.controller.observe_round(self.threshold, judged, num_failed)

    def observe_decoded_segment(self, num_tokens: int) -> None:
        self.controller.observe_decoded_segment(self.threshold, num_tokens)


@dataclass
class Request:
    """One answer on its way; places are tokens of its script."""

    script: Script
    question_rows: int
    started: float
    behind: list[int] = field(default_factory=list)
    place: int = 0
    plan: DraftPlan | None = None
    drafted: int = 0
    ends: tuple[int, ...] = ()
    judged_ends: tuple[int, ...] = ()
    writes_to: int = 0
    cut_at: int | None = None
    last_ms: float = 0.0
    is_over: bool = False
    num_failed: int = 0
    has_waited: bool = False

    def __post_init__(self) -> None:
        self.behind = list(accumulate(segment.length for segment in self.script))
        self.length, self.last_ms = self.behind[-1], self.started

    @property
    def limit(self) -> int:
        """How long the draft under way may get."""
        assert self.plan is not None
        return min(self.plan.draft_tokens, self.length - self.place)

    @property
    def is_drafting(self) -> bool:
        return self.plan is not None and not self.is_over

    @property
    def is_resting(self) -> bool:
        return self.plan is None and self.cut_at is None

    @property
    def rows(self) -> int:
        return 1 + self.judged_ends[-1] + len(self.judged_ends) * self.question_rows

    def segment_end(self, place: int) -> int:
        """Where the segment that holds the token at ``place`` ends."""
        return self.behind[min(bisect_right(self.behind, place), len(self.behind) - 1)]

    def ends_of(self, drafted: int) -> tuple[int, ...]:
        """Ends of segments in a draft that starts here; all of it if it has none."""
        first = bisect_right(self.behind, self.place)
        last = bisect_right(self.behind, self.place + drafted)
        return tuple(end - self.place for end in self.behind[first:last]) or (drafted,)

    @property
    def ahead(self) -> Iterator[tuple[int, Segment]]:
        """(Start, segment) of the text from here on, as a draft has it.

        Where the target has written another token than the draft had, the next draft goes on from
        that: it is right, and the target would write the same.
        """
        for end, segment in zip(self.behind, self.script, strict=True):
            start = end - segment.length
            if start >= self.place:
                yield start, segment
            elif end > self.place:
                rest = end - self.place
                agreed = max(0, start + segment.agreed - self.place)
                is_right = start + segment.agreed < self.place
                yield (
                    self.place,
                    Segment(rest, segment.is_bad and not is_right, rest if is_right else agreed),
                )

    def good_until(self) -> int:
        """How far a draft that starts here holds no rejected segment."""
        bad = (start for start, segment in self.ahead if segment.is_bad)
        return next(bad, self.length) - self.place

    def agreed_from(self, cut: int) -> int:
        """How many tokens the target would write, too, behind the first ``cut`` of a draft that
        starts here."""
        agreed = 0
        for start, segment in self.ahead:
            skipped = max(0, self.place + cut - start)
            if skipped >= segment.length:
                continue
            agreed += max(0, segment.agreed - skipped)
            if segment.agreed < segment.length:
                break
        return agreed

    def differing(self, cut: int) -> int:
        """Of so many tokens that are kept, those the target would have written otherwise: one of a
        segment, where it does not agree with all."""
        kept = (found for start, found in self.ahead if start < self.place + cut)
        return sum(segment.agreed < segment.length for segment in kept)


class Replay:
    """One server with ``concurrency`` requests at a time, until all scripts are answered."""

    def __init__(
        self,
        scripts: Sequence[Script],
        concurrency: int,
        prices: Prices,
        policy: Policy,
        question_rows: int = 40,
    ) -> None:
        self.waiting = list(scripts)[::-1]
        self.concurrency, self.prices, self.policy = concurrency, prices, policy
        self.question_rows = question_rows
        self.running: list[Request] = []
        self.ms = 0.0
        self.tokens = 0
        self.stepping_gaps: list[float] = []
        self.drafting_gaps: list[float] = []
        self.spent = dict.fromkeys(Stage, 0.0)

    def play(self) -> float:
        """Output tokens per second."""
        while self.waiting or self.running:
            self._admit()
            self._iterate()
            self.running = [r for r in self.running if r.place < r.length]
        return 1e3 * self.tokens / self.ms

    def _admit(self) -> None:
        new = []
        while self.waiting and len(self.running) + len(new) < self.concurrency:
            new.append(Request(self.waiting.pop(), self.question_rows, self.ms))
        if not new:
            return
        self.ms += self.prices.prefill(len(new))
        self._say_load(len(new))
        self.running += new
        for request in new:
            self._emit(request, 1, is_stepping=None)  # the prefill's own token
            self._ask(request)

    def _ask(self, request: Request) -> None:
        """Drafting may begin; else the target writes one segment more."""
        if request.cut_at is not None:
            self.policy.observe_decoded_segment(
                min(request.place, request.writes_to) - request.cut_at
            )
            request.cut_at = None
        request.plan = None
        if request.place >= request.length:
            return
        request.plan = self.policy.plan(request.num_failed)
        request.drafted, request.is_over = 0, False
        if request.plan is None:
            request.writes_to = request.segment_end(request.place)

    def _say_load(self, num_new: int = 0) -> None:
        resting = [r.num_failed for r in self.running if r.is_resting]
        self.policy.observe_load(len(self.running) + num_new, resting)

    def _iterate(self) -> None:
        self._say_load()
        drafting = [r for r in self.running if r.is_drafting]
        over = [r for r in self.running if r.is_over]
        stepping = [r for r in self.running if r.plan is None]
        may_join = not any(r.has_waited for r in over)
        may_join = may_join and all(r.limit - r.drafted <= self.policy.burst for r in drafting)
        steps, count = self.policy.share(
            *(len(drafting), [r.rows for r in over], len(stepping)), may_join=may_join
        )
        judged = over[:count]
        for i, request in enumerate(over):
            request.has_waited = i >= count
        self._take(Stage.SCHEDULER, len(self.running), 0, self.prices.overhead(len(self.running)))
        if drafting:
            self._burst(drafting, min(steps, max(r.limit - r.drafted for r in drafting)))
        num_rows = sum(r.rows for r in judged) + len(stepping)
        if judged:
            self._take(Stage.VERIFY, num_rows, 0, self.prices.verify(num_rows))
        elif stepping:
            count = len(stepping)
            self._take(Stage.DECODE, count, count, self.prices.step(count))
        for request in judged:
            self._judge(request)
        for request in stepping:
            self._emit(request, 1, is_stepping=True)
            if request.place >= request.writes_to:
                self._ask(request)

    def _burst(self, drafting: Sequence[Request], steps: int) -> None:
        count = len(drafting)
        self._take(Stage.DRAFT, count, steps, steps * self.prices.draft_step(count))
        for request in drafting:
            request.drafted = min(request.drafted + steps, request.limit)
            if request.drafted == request.limit:
                request.is_over = True
                self._question(request)

    def _question(self, request: Request) -> None:
        assert request.plan is not None
        request.ends = request.ends_of(request.drafted)
        request.judged_ends = tuple(evenly_spaced(request.ends, request.plan.max_prefixes))

    def _judge(self, request: Request) -> None:
        start, drafted = request.place, request.drafted
        last = request.judged_ends[-1]
        good = request.good_until()
        cut = max((end for end in request.judged_ends if end <= good), default=0)
        is_finished = start + cut >= request.length
        matched = min(request.agreed_from(cut), last - cut)
        emitted = cut + matched + (not is_finished)
        tail = drafted - cut - 1 if cut == last and cut < drafted else 0
        rejected = next((end for end in request.judged_ends if end > cut), None)
        is_end = start + drafted >= request.length
        judged = VerifyOutcome(
            *(drafted, last, len(request.ends), cut, rejected, is_end),
            num_matched=matched,
            num_mismatched=request.differing(cut),
        )
        self.policy.observe_round(judged, request.num_failed)
        request.num_failed = request.num_failed + 1 if judged.has_failed else 0
        self._emit(request, emitted, is_stepping=False)
        request.is_over = False
        if cut == last:
            self._ask(request)
            if request.plan is not None:
                request.drafted = min(max(tail, 0), request.limit)
                if request.drafted == request.limit:
                    request.is_over = True
                    self._question(request)
        else:
            request.plan, request.cut_at = None, start + cut
            request.writes_to = request.segment_end(start + cut)
            if request.place >= request.writes_to:
                self._ask(request)

    def _emit(self, request: Request, count: int, is_stepping: bool | None) -> None:
        count = min(count, request.length - request.place)
        request.place += count
        self.tokens += count
        gap, request.last_ms = self.ms - request.last_ms, self.ms
        if is_stepping is not None:
            (self.stepping_gaps if is_stepping else self.drafting_gaps).append(gap)

    def _take(self, stage: Stage, size: int, amount: int, ms: float) -> None:
        self.ms += ms
        self.spent[stage] += ms
        self.policy.observe(StageTime(stage, size, amount, ms))
