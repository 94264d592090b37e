"""The words of a request's state machine: its phases, its moves, and what it can be told.

    DRAFTING    the draft model writes; ends when the answer does or the round's budget is spent
    VERIFYING   one target pass judges the draft; its cut decides what is next
    DECODING  the target writes on after a cut; DRAFTING resumes when its segment is done
    PLAIN       plain target decoding from prefill to end: what PARSE cannot serve faithfully

No tensors, and nothing here changes: ``request`` is where a state does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypedDict


class Phase(Enum):
    DRAFTING = "drafting"
    VERIFYING = "verifying"
    DECODING = "decoding"
    PLAIN = "plain"


STEPPING = (Phase.DECODING, Phase.PLAIN)
"""Where the target writes."""


class Action(Enum):
    """What a request does in one iteration."""

    DRAFT = "draft"  # the draft model writes on
    VERIFY = "verify"  # the target judges the draft
    DECODE = "decode"  # the target writes one token
    EAGLE_DECODE = (
        "eagle decode"  # the target writes one or more tokens, with an EAGLE-3 head ahead of it
    )
    END_DRAFT = "end draft"  # no slots to draft on: the draft is over, the next pass judges it
    WAIT = "wait"  # no slots for its pass now, others' turn, or nothing left to do
    DROP_DRAFT = "drop draft"  # the draft is dropped, then as STEP


@dataclass(frozen=True, slots=True)
class Questions:
    """What a pass will ask about a draft that is over. Made by ``engine.rounds``.

    Attributes:
        prefix_ends: [K] ascending draft offsets.
        question_ids: [K] the questions' tokens.
        num_segments: segments of the draft; as many prefixes, or fewer.
        was_thinking: a think block is open before the draft.
    """

    prefix_ends: list[int]
    question_ids: list[tuple[int, ...]]
    num_segments: int
    was_thinking: bool = False


@dataclass(frozen=True, slots=True)
class RequestPolicy:
    """How a request is served: decided once, before its first prefill.

    Attributes:
        threshold: smallest verdict that accepts.
        keep_trace: collect one record per round.
        plain_reason: why the request is served plainly; "" under PARSE.
        continuation: under ``--parse-decode-accelerator eagle3``, what writes when no draft does:
            "eagle3", or "target" where the head cannot serve the request faithfully, or would read
            it for nothing; else "".
        uses_eagle: the head reads its prompt and its answer, for itself or for later turns.
        allow_async_decode: whether plain steps may be launched before the last one's token is read.
        stop_ids: tokens at which SGLang ends the answer; none where the request ignores them.
        certified: whether the server's certificate is about such a request; None without one.
        fingerprint: the server's, shown beside the trace.
    """

    threshold: float
    keep_trace: bool = False
    plain_reason: str = ""
    decode_accelerator: str = ""
    uses_eagle: bool = False
    allow_async_decode: bool = True
    stop_ids: frozenset[int] = frozenset()
    certified: bool | None = None
    fingerprint: Mapping[str, Any] | None = None

    @property
    def is_plain(self) -> bool:
        return bool(self.plain_reason)


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """How a round is made. Chosen by ``controller``.

    Attributes:
        draft_tokens: the draft ends there at the latest.
        max_prefixes: judged at most.
        draft_chunk: draft tokens per iteration, at most.
        speedup: expected, as a ratio to the plain target's speed; None where the round is to find
            out, or nothing was asked.
    """

    draft_tokens: int
    max_prefixes: int
    draft_chunk: int
    speedup: float | None = None


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a request stands between two drafts.

    Attributes:
        phase: what it does next.
        segment_start: output length at the last cut; a continuation is done when the segment
            that starts there is.
        resumes: whether drafting resumes after this continuation.
        skipped_drafts: drafts that were due meanwhile and not begun, because they did not pay.
        plan: of the draft that begins here, if one does.
        drafting_suspended: a draft was due here and not begun.
        num_failed: how many drafts in a row, up to the last, were good for nothing.
    """

    phase: Phase
    segment_start: int
    resumes: bool = True
    skipped_drafts: int = 0
    plan: DraftPlan | None = None
    drafting_suspended: bool = False
    num_failed: int = 0


class TraceRecord(TypedDict):
    """One round: enough to compute every verdict again elsewhere.

    Attributes:
        output_start: the draft starts behind this many output tokens.
        anchor_token_id: the last of them.
        draft_token_ids: the draft; it may begin with the end of the one before that nobody judged.
        finished: the draft model ended the answer: the last question is about all of it.
        prefix_ends: prefix k is the draft's first ``prefix_ends[k]`` tokens.
        question_token_ids: per prefix, the question's tokens.
        accept_token_id, reject_token_id: the verdict tokens; null in token mode.
        verdicts: per prefix, p(accept) / (p(accept) + p(reject)) at the question's last token.
        verdict_mass: per prefix, p(accept) + p(reject): how much of the probability the verdict
            tokens get.
        threshold: smallest verdict that accepts.
        selection: the rule that made the cut of the verdicts, as ``--parse-selection`` has it; null
            where none did (token mode, simulated acceptance).
        accepted_len: draft tokens kept.
        decided_by: index into ``verdicts`` of the one that decided: it accepts, and its prefix is
            kept, or rejects, and the prefix before it is; null where none did (token mode,
            simulated acceptance, nothing accepted under "longest").
        next_token_id: the target's own token at the cut; null if the kept draft ends the answer.
        bonus_token_ids: what is output behind the kept part: the draft's tokens as far as the target
            would have written them itself, then its next one; empty if the answer ends before.
        target_token_ids: [judged tokens + 1] what the target itself would write behind the draft's
            first k tokens.
        plan: how the round was planned: ``draft_tokens``, ``max_prefixes`` and ``draft_chunk`` at
            most, and the ``speedup`` expected of it; null where it was to find out.
    """

    output_start: int
    anchor_token_id: int
    draft_token_ids: list[int]
    finished: bool
    prefix_ends: list[int]
    question_token_ids: list[list[int]]
    accept_token_id: int | None
    reject_token_id: int | None
    verdicts: list[float]
    verdict_mass: list[float]
    threshold: float
    selection: str | None
    accepted_len: int
    decided_by: int | None
    next_token_id: int | None
    bonus_token_ids: list[int]
    target_token_ids: list[int]
    plan: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Round:
    """A draft that was judged.

    Attributes:
        accepted_len: how many of its tokens are kept.
        matched: how many of those behind them the target would have written itself: they come as
            its own.
        tail: those that nobody judged and that stand behind the target's own token as they would
            in a new draft: the next draft begins with them.
        record: the trace's, where one is kept.
    """

    accepted_len: int
    matched: int = 0
    tail: tuple[int, ...] = ()
    record: TraceRecord | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a forward of the target means for one request. Made by ``engine.rounds``.

    Attributes:
        token_ids: [n >= 0] what it emits: kept draft tokens, then the target's own.
        num_own: how many at the end of them are the target's own.
        standing: where it stands behind them.
        round: the draft that was judged, if one was.
        eagle3_steps: 1 where an EAGLE-3 head's proposal was checked.
        num_beyond: how many at the end of them a step wrote where drafting may resume.
        fault: why it must end with an error; all else then means nothing.
    """

    token_ids: tuple[int, ...] = ()
    num_own: int = 0
    standing: Standing | None = None
    round: Round | None = None
    eagle3_steps: int = 0
    num_beyond: int = 0
    fault: str = ""
