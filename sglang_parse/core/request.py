"""The state machine of one request, and who does what in this iteration. No tensors.

    DRAFTING    the draft model writes; ends when the answer does or the round's budget is spent
    VERIFYING   one target pass judges the draft; its cut decides what is next
    CONTINUING  the target writes on after a cut; DRAFTING resumes when its segment is done
    PLAIN       plain target decoding from prefill to end: what PARSE cannot serve faithfully

``committed`` counts the tokens whose KV is final. The last output token (the anchor) has no KV
yet; it is the first row of whatever runs next. Both are what the worker knows; SGLang's
``kv_committed_len`` and ``output_ids`` follow when it processes the iteration's result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Phase(Enum):
    DRAFTING = "drafting"
    VERIFYING = "verifying"
    CONTINUING = "continuing"
    PLAIN = "plain"


STEPPING = (Phase.CONTINUING, Phase.PLAIN)
"""Where the target writes."""


class Move(Enum):
    """What a request does in one iteration."""

    BURST = "burst"  # the draft model writes on
    PASS = "pass"  # the target judges the draft
    STEP = "step"  # the target writes one token
    EAGLE = "eagle"  # the target writes one or more tokens, with an EAGLE-3 head ahead of it
    JUDGE = "judge"  # no slots to draft on: the draft is over, the next pass judges it
    WAIT = "wait"  # no slots for its pass now, or nothing left to do
    GIVE_UP = "give up"  # the draft is dropped, then as STEP


@dataclass(slots=True)
class Draft:
    """What the draft model wrote since the last committed token.

    Attributes:
        token_ids: draft tokens.
        finished: the draft model ended the answer (its last token is a stop token).
        prefix_ends, question_ids: what the verification pass will judge; filled by
            ``verify.plan_questions`` when drafting is over, empty in token mode.
    """

    token_ids: list[int] = field(default_factory=list)
    finished: bool = False
    prefix_ends: list[int] = field(default_factory=list)
    question_ids: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def num_question_rows(self) -> int:
        return sum(map(len, self.question_ids))


@dataclass(slots=True)
class RequestState:
    """PARSE's side of one request; kept on the ``Req`` it belongs to.

    Attributes:
        phase: what the request does in the next iteration.
        threshold: smallest verdict that accepts, for this request.
        keep_trace: collect one record per round.
        plain_reason: why the request is served plainly; "" under PARSE.
        draft: the draft under way.
        draft_kv_len: leading tokens of the sequence for which the draft model's KV is right.
        segment_start: output length at the last cut; a continuation is done when the segment
            that starts there is.
        resumes: whether drafting resumes after this continuation.
        stats: the counters that go to ``meta_info``.
        trace: one record per round, see the README.
        is_thinking, num_read: whether a think block is open behind the first ``num_read`` output
            tokens; filled by ``rounds`` when it plans questions.
        stop_ids: tokens that end the answer; filled by ``commit.is_stop_token``.
        fault: why the request must end with an error; filled by the stage that noticed.
        target_run: how many tokens at the end of the last emitted run are the target's own.
        continuation: under ``--parse-continuation eagle3``, what writes when no draft does:
            "eagle3", or "target" where the head cannot serve the request faithfully; else "".
        head: what the EAGLE-3 head goes on from (``eagle3.HeadState``), behind the last emitted
            token; None where there is none.
        move: what it does in this iteration, by ``grants.share_out``.
        waited: iterations in a row it has waited for KV slots.
        steps_unread: whether plain steps may be launched before the last one's token is read.
        output_ids: output tokens that have been read from the device.
        committed: leading tokens of the sequence whose KV is final.
        num_unread: tokens the target has written behind them that nobody has read yet.
        settled: what ``metrics.Tally`` has counted of it.
    """

    phase: Phase
    threshold: float
    keep_trace: bool = False
    plain_reason: str = ""
    draft: Draft = field(default_factory=Draft)
    draft_kv_len: int = 0
    segment_start: int = 0
    resumes: bool = True
    stats: Stats = field(default_factory=lambda: Stats())
    trace: list[dict[str, Any]] = field(default_factory=list)
    is_thinking: bool = False
    num_read: int = 0
    stop_ids: frozenset[int] | None = None
    fault: str = ""
    target_run: int = 1
    continuation: str = ""
    head: object | None = None
    move: Move = Move.STEP
    waited: int = 0
    steps_unread: bool = True
    output_ids: list[int] = field(default_factory=list)
    committed: int = 0
    num_unread: int = 0
    settled: dict[str, float] = field(default_factory=dict)

    @property
    def committed_len(self) -> int:
        """Leading tokens of the sequence whose KV is final once what is under way has run."""
        return self.committed + self.num_unread

    @property
    def is_plain(self) -> bool:
        return bool(self.plain_reason)

    def restart(self, prefilled_len: int, output_ids: Sequence[int]) -> None:
        """After a prefill (the first, or one that follows a retraction): no draft, KV complete.

        Args:
            prefilled_len: tokens prefilled so far.
            output_ids: those of them that are output.
        """
        self.phase = Phase.PLAIN if self.is_plain else Phase.DRAFTING
        self.draft = Draft()
        self.draft_kv_len = self.committed = prefilled_len
        self._take_back(len(self.output_ids) - len(output_ids))
        self.output_ids = list(output_ids)
        self.num_unread = self.num_read = 0
        self.head = None

    def _take_back(self, num_lost: int) -> None:
        """A retraction under overlap loses the last run: SGLang had not processed it yet."""
        self.stats.accepted_tokens -= max(0, num_lost - self.target_run)
        start = len(self.output_ids) - num_lost
        self.trace = [record for record in self.trace if record["output_start"] < start]

    def write(self, token_ids: Sequence[int]) -> None:
        """Tokens a decode iteration emitted."""
        self.output_ids.extend(token_ids)
        self.committed += len(token_ids)

    def start_draft(self) -> None:
        self.draft = Draft()
        self.phase = Phase.DRAFTING

    def continue_segment(self) -> None:
        """The target writes until its segment is done; then drafting resumes."""
        self.draft = Draft()
        self.phase = Phase.CONTINUING
        self.resumes = True

    def continue_to_end(self) -> None:
        """The target writes to the end of the answer."""
        self.draft = Draft()
        self.phase = Phase.CONTINUING
        self.resumes = False


@dataclass(slots=True)
class Stats:
    """Counters of one request. ``_ms`` are the request's share of each stage's wall time.

    ``short_drafts`` are drafts ended or given up because the KV pool had no slots for them;
    ``skipped_drafts`` were not begun because drafting did not pay (``switch``);
    ``eagle3_tokens`` are what ``eagle3_steps`` target forwards with an EAGLE-3 head wrote.
    """

    rounds: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    short_drafts: int = 0
    skipped_drafts: int = 0
    eagle3_steps: int = 0
    eagle3_tokens: int = 0
    draft_ms: float = 0.0
    verification_ms: float = 0.0
    continuation_ms: float = 0.0
    prefill_ms: float = 0.0


def tail_len(
    state: RequestState, burst_tokens: int, draft_budget: int, continuation_rows: int = 1
) -> int:
    """KV slots the request needs behind ``committed`` in the next iteration.

    Args:
        state: the request's state; a pure function of it, because SGLang asks twice (once for
            the capacity check, once to allocate) and the answers must agree.
        burst_tokens: draft steps per iteration.
        draft_budget: draft tokens this request may hold in this round, at least what it holds.
        continuation_rows: rows of the target forward when no draft is judged: the anchor, and
            what an EAGLE-3 head proposes.
    """
    if state.phase is Phase.DRAFTING:
        return min(len(state.draft.token_ids) + burst_tokens, draft_budget)
    if state.phase is Phase.VERIFYING:
        return 1 + len(state.draft.token_ids) + state.draft.num_question_rows
    return continuation_rows
