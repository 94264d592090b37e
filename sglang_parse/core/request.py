"""The state machine of one request: every change of its state is made here. No tensors.

``committed`` counts the tokens whose KV is final. The last output token (the anchor) has no KV
yet; it is the first row of whatever runs next. Both are what the worker knows; SGLang's
``kv_committed_len`` and ``output_ids`` follow when it processes the iteration's result.

Whoever plans, drafts, judges or writes hands in a record (``Action``, ``Questions``, ``Outcome``) or
a number, and the state changes by it. An iteration changes it in this order:

    take          plan: the move of this iteration
    launch_draft  a draft chunk is in flight     launch_step  so is a decode step of the target
    add_draft     its tokens have arrived        ask     its draft is over: what it will be asked
    apply         a pass or a step has been decided      write   its tokens are output
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang_parse.core.phases import (
    STEPPING,
    Action,
    DraftPlan,
    Outcome,
    Phase,
    Questions,
    RequestPolicy,
    Round,
    Standing,
    TraceRecord,
)

NAN_IN_DRAFT = "NaN in the draft model's logits"
"""Why a request ends whose draft cannot be computed."""


@dataclass(slots=True)
class Draft:
    """What the draft model wrote since the last committed token.

    Attributes:
        token_ids: draft tokens.
        finished: the draft model ended the answer (its last token is a stop token).
        candidates: tokens that may follow them, proposed by mask tokens and not verified yet
            (``block``); their KV never counts.
        prefix_ends, question_ids: what the verification pass will judge; filled by
            ``RequestState.ask`` when drafting is over, empty in token mode.
        num_segments: segments they stand for; 0 in token mode.
    """

    token_ids: list[int] = field(default_factory=list)
    finished: bool = False
    candidates: tuple[int, ...] = ()
    prefix_ends: list[int] = field(default_factory=list)
    question_ids: list[tuple[int, ...]] = field(default_factory=list)
    num_segments: int = 0

    @property
    def num_judged(self) -> int:
        """Tokens that its pass has rows for: nobody asks about those behind the last prefix."""
        return self.prefix_ends[-1] if self.prefix_ends else len(self.token_ids)

    @property
    def judged_ids(self) -> list[int]:
        return self.token_ids[: self.num_judged]

    @property
    def num_rows(self) -> int:
        """Of its pass: the last output token, what is judged, the questions."""
        return 1 + self.num_judged + sum(map(len, self.question_ids))


@dataclass(slots=True)
class Stats:
    """Counters of one request, under these names in ``meta_info["parse"]``.

    Attributes:
        rounds: drafts that were judged, one verification pass each.
        drafted_tokens: tokens the draft model wrote.
        draft_forwards: forwards of the draft model that wrote them: fewer, where it writes several
            tokens a forward.
        accepted_tokens: those of them that were kept.
        matched_tokens: those of them behind a cut that the target would have written itself; they
            are among its ``target_tokens``.
        kv_truncated_drafts: drafts ended early or given up because KV slots were short.
        skipped_drafts: how often a draft could have begun and did not, because it was not expected
            to pay (asked at each segment's end, in token mode at each token).
        eagle3_steps, eagle3_tokens: target forwards with an EAGLE-3 head ahead, and the
            ``target_tokens`` they wrote; only with ``--parse-decode-accelerator eagle3``.
        prefill_ms, draft_ms, verify_ms, decode_ms: the request's share of each stage's
            wall time; what the draft model reads before it writes is drafting.
    """

    rounds: int = 0
    drafted_tokens: int = 0
    draft_forwards: int = 0
    accepted_tokens: int = 0
    matched_tokens: int = 0
    kv_truncated_drafts: int = 0
    skipped_drafts: int = 0
    eagle3_steps: int = 0
    eagle3_tokens: int = 0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    decode_ms: float = 0.0
    prefill_ms: float = 0.0


@dataclass(slots=True)
class RequestState:
    """PARSE's side of one request; kept on the ``Req`` it belongs to.

    Attributes:
        policy: how it is served.
        phase: what the request does in the next iteration.
        action: what it does in this one.
        plan: how its round is made: the one under way, or the last; None before the first.
        waited: iterations in a row it has waited for KV slots or for its pass.
        draft: the draft under way.
        num_draft_inflight: tokens the draft model has been sent to write behind it, which nobody has
            read yet; of blocks, as many as they can bring.
        draft_kv_len: leading tokens of the sequence for which the draft model's KV is right.
        draft_kv_found: whether that was looked up since the last prefill; 0 means nothing before.
        segment_start, resumes, drafting_suspended, num_failed: see ``Standing``.
        head: what the EAGLE-3 head goes on from (``engine.head.HeadState``), behind the last
            emitted token; None where there is none.
        output_ids: output tokens that have been read from the device.
        committed: leading tokens of the sequence whose KV is final.
        prefilled_len: those of them that the last prefill left.
        num_inflight: tokens the target has written behind them that nobody has read yet.
        num_stepped: output tokens that the target had to write in steps: not in passes, nor beyond
            where drafting could resume.
        is_thinking, num_scanned: whether a think block is open behind the first ``num_scanned``
            output tokens.
        fault: why the request must end with an error.
        wrote_at: when it last emitted tokens, if the target has been writing on since; in seconds.
        target_run: how many tokens at the end of the last emitted run are the target's own;
            ``matched_run``: the first of those, which the draft had, too.
        stats: the counters that go to ``meta_info``.
        trace: one record per round.
        counted: what a ``counters.Counters`` has counted of it.
    """

    policy: RequestPolicy
    phase: Phase = Phase.DRAFTING
    action: Action = Action.DECODE
    plan: DraftPlan | None = None
    waited: int = 0
    draft: Draft = field(default_factory=Draft)
    num_draft_inflight: int = 0
    draft_kv_len: int = 0
    draft_kv_found: bool = False
    segment_start: int = 0
    resumes: bool = True
    drafting_suspended: bool = False
    num_failed: int = 0
    head: object | None = None
    output_ids: list[int] = field(default_factory=list)
    committed: int = 0
    prefilled_len: int = 0
    num_inflight: int = 0
    num_stepped: int = 0
    is_thinking: bool = False
    num_scanned: int = 0
    fault: str = ""
    wrote_at: float | None = None
    target_run: int = 1
    matched_run: int = 0
    stats: Stats = field(default_factory=Stats)
    trace: list[TraceRecord] = field(default_factory=list)
    counted: dict[str, float] = field(default_factory=dict)

    @property
    def committed_len(self) -> int:
        """Leading tokens of the sequence whose KV is final once what is under way has run."""
        return self.committed + self.num_inflight

    @property
    def num_drafted(self) -> int:
        return len(self.draft.token_ids)

    @property
    def is_stepping(self) -> bool:
        """Whether the target writes."""
        return self.phase in STEPPING

    @property
    def standing(self) -> Standing:
        return Standing(
            self.phase,
            self.segment_start,
            self.resumes,
            drafting_suspended=self.drafting_suspended,
            num_failed=self.num_failed,
        )

    # -- prefill ----------------------------------------------------------------

    def restart(self, prefilled_len: int, output_ids: Sequence[int]) -> None:
        """After a prefill (the first, or one that follows a retraction): no draft, and the target's
        KV complete.

        Args:
            prefilled_len: tokens prefilled so far.
            output_ids: those of them that are output.
        """
        self.phase = Phase.PLAIN if self.policy.is_plain else Phase.DRAFTING
        self.draft = Draft()
        self.committed = self.prefilled_len = prefilled_len
        self.draft_kv_len, self.draft_kv_found = 0, False
        self._take_back(len(self.output_ids) - len(output_ids))
        self.output_ids = list(output_ids)
        self.num_inflight = self.num_draft_inflight = self.num_scanned = 0
        self.head = self.wrote_at = None

    def _take_back(self, num_lost: int) -> None:
        """A retraction under overlap loses the last run: SGLang had not processed it yet."""
        accepted, matched = self.at_the_end(num_lost)
        self.stats.accepted_tokens -= accepted
        self.stats.matched_tokens -= matched
        start = len(self.output_ids) - num_lost
        self.trace = [record for record in self.trace if record["output_start"] < start]

    def begin(self, standing: Standing, first_id: int | None) -> None:
        """A prefill is complete; ``first_id`` is the token it chose, without KV yet."""
        self._stand(standing)
        if first_id is not None:
            self.output_ids.append(first_id)

    # -- plan -------------------------------------------------------------------

    def take(self, move: Action) -> None:
        """What it does in this iteration, by ``slots.allocate_kv_slots``."""
        self.action = move
        self.waited = self.waited + 1 if move is Action.WAIT else 0
        if move is Action.END_DRAFT:
            self.stats.kv_truncated_drafts += 1
            self.phase = Phase.VERIFYING
        elif move is Action.DROP_DRAFT:
            self.stats.kv_truncated_drafts += 1
            self.draft_kv_len = min(self.draft_kv_len, self.committed_len)
            start = len(self.output_ids)
            self._stand(Standing(Phase.DECODING, start, num_failed=self.num_failed))
            self.action = Action.DECODE

    # -- draft ------------------------------------------------------------------

    def launch_draft(self, num_tokens: int) -> None:
        """Counts draft tokens, at most, that the draft model has been launched for."""
        self.num_draft_inflight += num_tokens

    def add_draft(
        self,
        token_ids: Sequence[int],
        budget: int,
        *,
        num_launched: int,
        candidates: Sequence[int] | None = None,
    ) -> None:
        """Adds draft tokens that have arrived; drops those after the draft's end.

        Args:
            token_ids: the tokens before the first one that could not be computed.
            budget: draft tokens the round may hold.
            num_launched: how many of ``launch_draft``'s tokens they stand for.
            candidates: tokens that may follow, if one forward drafted all of ``token_ids``; None if
                a forward drafted each.
        """
        self.num_draft_inflight -= num_launched
        if self.phase is not Phase.DRAFTING or self.fault:
            return
        is_block, count = candidates is not None, self.num_drafted
        for token in token_ids:
            self.draft.token_ids.append(token)
            self.draft.finished = token in self.policy.stop_ids
            if self.draft.finished or self.num_drafted >= budget:
                self.phase = Phase.VERIFYING
                break
        # The last token's KV may not be written yet.
        self.draft_kv_len = self.committed_len + self.num_drafted
        num_added = self.num_drafted - count
        self.stats.drafted_tokens += num_added
        self.stats.draft_forwards += min(num_added, 1) if is_block else num_added
        is_drafting = self.phase is Phase.DRAFTING
        self.draft.candidates = tuple(candidates or ()) if is_drafting else ()
        if is_drafting and len(token_ids) < (1 if is_block else num_launched):
            self.fail(NAN_IN_DRAFT)

    def ask(self, questions: Questions) -> None:
        """The draft is over; what its pass will ask."""
        self.draft.prefix_ends = questions.prefix_ends
        self.draft.question_ids = questions.question_ids
        self.draft.num_segments = questions.num_segments
        self.is_thinking = questions.was_thinking
        self.num_scanned = len(self.output_ids)

    def record_draft_kv(self, length: int, *, is_sure: bool) -> None:
        """Records a look at the marks: the prompt has draft KV up to ``length`` tokens.

        Args:
            is_sure: it need not be looked up again.
        """
        is_whole = length >= self.prefilled_len
        self.draft_kv_len = max(length, self.draft_kv_len) if is_whole else length
        self.draft_kv_found = is_sure

    def set_draft_kv_len(self, length: int) -> None:
        """Records that the sequence has draft KV up to ``length`` tokens."""
        self.draft_kv_len = length

    # -- target -----------------------------------------------------------------

    def launch_step(self) -> None:
        """The target is on its way to one more token, which nobody has read."""
        self.num_inflight += 1

    def read_step(self) -> None:
        self.num_inflight -= 1

    def apply(self, outcome: Outcome) -> None:
        """What the target said, decided; the tokens themselves are ``write``'s."""
        if outcome.fault:
            self.fault = outcome.fault
            self.draft = Draft()
            return
        self.target_run = outcome.num_own
        self.matched_run = outcome.round.matched if outcome.round else 0
        self.stats.eagle3_steps += outcome.eagle3_steps
        self.stats.eagle3_tokens += outcome.eagle3_steps * len(outcome.token_ids)
        if outcome.standing is not None:
            self._stand(outcome.standing)
        if outcome.round is None:
            self.num_stepped += len(outcome.token_ids) - outcome.num_beyond
        else:
            self._close_round(outcome.round)

    def _close_round(self, judged: Round) -> None:
        self.stats.rounds += 1
        self.stats.accepted_tokens += judged.accepted_len
        self.stats.matched_tokens += judged.matched
        if judged.record is not None:
            self.trace.append(judged.record)
        # The draft's KV is right up to its own kept tokens; the target's next token is new, unless
        # it is the draft's too: then all of the draft's is.
        kept = judged.accepted_len + judged.matched + len(judged.tail)
        self.draft_kv_len = min(self.draft_kv_len, self.committed_len + 1 + kept)
        self.draft.token_ids.extend(judged.tail)

    def _stand(self, standing: Standing) -> None:
        self.phase = standing.phase
        self.segment_start = standing.segment_start
        self.resumes = standing.resumes
        self.drafting_suspended, self.num_failed = standing.drafting_suspended, standing.num_failed
        self.stats.skipped_drafts += standing.skipped_drafts
        self.plan = standing.plan or self.plan
        self.draft = Draft()

    def set_head(self, head: object | None) -> None:
        """What the EAGLE-3 head goes on from; None until its forward has succeeded."""
        self.head = head

    def write(self, token_ids: Sequence[int]) -> None:
        """Tokens a decode iteration emitted."""
        self.output_ids.extend(token_ids)
        self.committed += len(token_ids)

    def gap(self, now: float) -> float | None:
        """Seconds since it last emitted tokens, as it emits some; None where it did not continue
        (or was not served plainly) from then till now."""
        gap = None if self.wrote_at is None else now - self.wrote_at
        self.wrote_at = now if self.is_stepping else None
        return gap

    # -- accounting -------------------------------------------------------------

    def at_the_end(self, num_tokens: int) -> tuple[int, int]:
        """How many of the last run's last tokens were accepted, and how many matched."""
        drafted = max(0, num_tokens - (self.target_run - self.matched_run))
        return max(0, num_tokens - self.target_run), min(drafted, self.matched_run)

    def fail(self, reason: str) -> None:
        """The request must end with this error."""
        self.fault = reason

    def charge(
        self,
        *,
        prefill: float = 0.0,
        draft: float = 0.0,
        verify: float = 0.0,
        decode: float = 0.0,
    ) -> None:
        """Its share, in ms, of a stage's wall time."""
        self.stats.prefill_ms += prefill
        self.stats.draft_ms += draft
        self.stats.verify_ms += verify
        self.stats.decode_ms += decode

    def count(self, figure: str, value: float) -> float:
        """How much a figure has grown since it was last counted; what shrank grows again first."""
        growth = value - self.counted.get(figure, 0)
        if growth > 0:
            self.counted[figure] = value
        return growth


def lookahead_slots(
    state: RequestState,
    draft_chunk: int,
    draft_budget: int,
    continuation_rows: int = 1,
    block_rows: int = 0,
) -> int:
    """KV slots the request needs behind ``committed`` in the next iteration.

    Args:
        state: the request's state; a pure function of it, because SGLang asks twice (once for
            the capacity check, once to allocate) and the answers must agree.
        draft_chunk: draft tokens per iteration.
        draft_budget: draft tokens this request may hold in this round, at least what it holds.
        continuation_rows: rows of the target forward when no draft is judged: the anchor, and
            what an EAGLE-3 head proposes.
        block_rows: rows of a draft forward that writes several tokens: it may stand behind the
            draft's last one.
    """
    if state.phase is Phase.DRAFTING:
        num_drafted = state.num_drafted + state.num_draft_inflight
        return min(num_drafted + draft_chunk, draft_budget) + block_rows
    if state.phase is Phase.VERIFYING:
        # Who goes on with a draft's unjudged end needs the draft model's KV of it.
        return max(1 + state.num_drafted, state.draft.num_rows)
    return continuation_rows
