"""Phases and actions of a request, and the records that its state machine works with.

    DRAFTING    the draft model drafts until the answer ends or the plan's budget is spent
    VERIFYING   one target verify pass judges the draft
    DECODING    the target decodes a token where no draft could begin, the rest of a rejected
                segment, or to the answer's end
    PLAIN       plain target decoding from prefill to finish: the fallback
    WAITING     a draft is on its way from another server

No tensors. Phase and KV change in ``core.request`` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NotRequired, TypedDict

from sglang_parse.core.doubt import Doubt

DraftKey = tuple[float, str]
"""(threshold, LoRA adapter; "" for none). Drafts of one key have statistics of their own."""


class Phase(Enum):
    DRAFTING = "drafting"
    VERIFYING = "verifying"
    DECODING = "decoding"
    PLAIN = "plain"
    WAITING = "waiting"


TARGET_DECODES = (Phase.DECODING, Phase.PLAIN)


class Action(Enum):
    DRAFT = "draft"  # the draft model drafts on
    VERIFY = "verify"  # the target verifies the draft
    DECODE = "decode"  # the target decodes one token
    PROPOSE = "propose"  # an EAGLE-3 head or MTP layer proposes a draft, which is verified
    WAIT = "wait"  # no KV slots now, another request's turn, or finished


@dataclass(frozen=True, slots=True)
class RequestPolicy:
    """How a request is served. Decided at admission, before its first prefill.

    Attributes:
        threshold: smallest verdict that accepts a prefix.
        judge: where its verdicts come from, as ``ParseConfig.judge_name``; None if drafts are
            compared with the target's choices token by token.
        strict: classes of tokens that must be the target's own choice (``core.strict``).
        adapter: id of its LoRA adapter; "" for none.
        keep_trace, keep_hidden_states: collect records of rounds; with the target's hidden states.
        draft_token_ids: the answer's first tokens, given by the client: the first replaces the
            target's, the others are the first draft.
        always_drafts: draft even while drafting is suspended.
        plain_reason: reason for the fallback to plain decoding; "" under PARSE.
        proposer: with an EAGLE-3 head "eagle3", with an MTP layer "mtp", or "none" where it cannot
            serve the request or would not pay for itself; else "".
        uses_eagle: the head runs for this request, for itself or for later turns.
        allow_async_decode: a decode step may launch before the last one's token is on the host.
        is_adjusted: its parameters change logits before a token is chosen (``engine.logits``).
        stop_ids: token ids that finish the request; empty under ``ignore_eos``.
        certified: whether the server's certificate covers the request; None without one.
        fingerprint: the server's, returned with a trace.
    """

    threshold: float
    judge: str | None = None
    strict: tuple[str, ...] = ()
    adapter: str = ""
    keep_trace: bool = False
    keep_hidden_states: bool = False
    draft_token_ids: tuple[int, ...] = ()
    always_drafts: bool = False
    plain_reason: str = ""
    proposer: str = ""
    uses_eagle: bool = False
    allow_async_decode: bool = True
    is_adjusted: bool = False
    stop_ids: frozenset[int] = frozenset()
    certified: bool | None = None
    fingerprint: Mapping[str, Any] | None = None

    @property
    def is_plain(self) -> bool:
        return bool(self.plain_reason)

    @property
    def rejects_all(self) -> bool:
        """Whether nothing is accepted: greedy output is then the plain target's."""
        return self.threshold > 1


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """Length and granularity of one draft. Chosen by ``policy.controller``.

    Attributes:
        draft_tokens: maximum length of the draft.
        max_prefixes: maximum number of prefixes to verify.
        draft_chunk: maximum number of draft tokens per iteration.
        speedup: measured last, relative to decode steps; None before, and for a fixed plan.
        doubt: where the draft ends earlier; None for nowhere.
    """

    draft_tokens: int
    max_prefixes: int
    draft_chunk: int
    speedup: float | None = None
    doubt: Doubt | None = None

    def record(self) -> dict[str, float | None]:
        """What traces and responses tell of it."""
        told = {name: getattr(self, name) for name in self.__slots__ if name != "doubt"}
        return {**told, "least_chance": self.doubt and round(self.doubt.least, 4)}


MODEL, PREDICTION, ANSWERS, ENDPOINT = "model", "prediction", "answers", "endpoint"
PROMPT = "prompt"
EAGLE3, MTP, GRAMMAR, GIVEN = "eagle3", "mtp", "grammar", "draft_token_ids"
"""Sources of drafts: the draft model, the request's predicted output, earlier answers, another
server, its prompt and output so far, the target's EAGLE-3 head or MTP layer, text that a grammar
forces, the tokens that a request gave."""
PROPOSERS = (EAGLE3, MTP)
"""Those that continue from the target's hidden states."""


@dataclass(slots=True)
class Draft:
    """Draft tokens after the last committed token.

    >>> draft = Draft([5, 6, 7, 8], prefix_ends=[2, 3], question_ids=[(90, 91), (90, 91)])
    >>> draft.verified_ids  # the last line is not over: nothing is asked about it
    [5, 6, 7]
    >>> draft.num_rows  # the anchor, three tokens, two questions
    8

    Attributes:
        judge: where its verdicts come from, as ``RequestPolicy.judge``; None if it is compared with
            the target's choices token by token.
        finished: the last one is a stop token: the draft model ended the answer.
        is_truncated: KV slots ran short; it is counted as such.
        levels: the draft model's sureness of its tokens (``core.doubt``); none of texts.
        chance: that all of it is accepted, by its plan; ``in_doubt``: it ended for that.
        candidates: proposals of mask tokens, or of a head, for what follows (``block``). No draft
            tokens: once the draft is complete, its pass compares them with the target's choices.
        prefix_ends, question_ids: what the verify pass verifies; set by ``RequestState.ask``,
            empty in token mode.
        num_ahead: tokens that its pass has rows for, if that is launched before the host has all of
            the draft's tokens; 0 once it has them.
        room: tokens by which a text may extend it, once it is written.
        tail_at, tail_source: where the tokens of a text that extends it begin; None without.
    """

    token_ids: list[int] = field(default_factory=list)
    source: str = MODEL
    judge: str | None = None
    finished: bool = False
    is_truncated: bool = False
    levels: list[int] = field(default_factory=list)
    chance: float = 1.0
    in_doubt: bool = False
    candidates: tuple[int, ...] = ()
    prefix_ends: list[int] = field(default_factory=list)
    question_ids: list[tuple[int, ...]] = field(default_factory=list)
    num_ahead: int = 0
    room: int = 0
    tail_at: int | None = None
    tail_source: str = ""

    @property
    def num_verified(self) -> int:
        """Number of draft tokens in the verify pass: up to the last prefix."""
        return self.prefix_ends[-1] if self.prefix_ends else len(self.token_ids)

    @property
    def verified_ids(self) -> list[int]:
        return self.token_ids[: self.num_verified]

    @property
    def compared_ids(self) -> list[int]:
        """Tokens of the verify pass behind the anchor: the verified ones, then candidates."""
        return [*self.verified_ids, *self.candidates]

    def add(self, token_id: int, level: int, doubt: Doubt | None) -> None:
        """Adds a token of the draft model."""
        self.token_ids.append(token_id)
        self.levels.append(level)
        self.chance *= doubt.chances[level] if doubt else 1.0

    def accepted(self, accepted_len: int) -> Draft:
        """Its accepted part."""
        num_prefixes = sum(end <= accepted_len for end in self.prefix_ends)
        return replace(
            self,
            token_ids=self.token_ids[:accepted_len],
            finished=self.finished and accepted_len == len(self.token_ids),
            prefix_ends=self.prefix_ends[:num_prefixes],
            question_ids=self.question_ids[:num_prefixes],
        )

    @property
    def num_rows(self) -> int:
        """Rows of the verify pass: anchor, verified draft tokens, candidates, questions."""
        num_tokens = max(self.num_ahead, self.num_verified + len(self.candidates))
        return 1 + num_tokens + sum(map(len, self.question_ids))


@dataclass(slots=True)
class SourceStats:
    """``Stats`` of one request's drafts from one source, in ``meta_info["parse"]["sources"]``; it
    waited ``wait_ms`` for them."""

    rounds: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    matched_tokens: int = 0
    verify_ms: float = 0.0
    wait_ms: float = 0.0


@dataclass(slots=True)
class Stats:
    """Counters of one request, under these names in ``meta_info["parse"]``.

    Attributes:
        rounds: verified drafts.
        drafted_tokens: draft tokens of all sources; not the candidates that a parallel draft's pass
            compares behind it, which count in ``target_tokens`` where they match.
        draft_forwards: draft model forwards that wrote its part of them; fewer under parallel
            drafting.
        accepted_tokens: draft tokens accepted by the selection rule.
        matched_tokens: draft tokens after the accepted prefix that equal the target's choices and
            are output; counted in ``target_tokens``.
        matched_prefixes: verified prefixes that the target would have written itself: all of their
            tokens equal its choices. Counted in greedy requests under semantic verification.
        rejected_matched_prefixes: those of them whose verdict is below the threshold.
        kv_truncated_drafts: drafts ended early or dropped because KV slots ran short.
        kv_slots_granted: KV slots behind the sequence, of all iterations: for drafts and passes.
        doubted_drafts: drafts that ended because the draft model was unsure.
        skipped_drafts: tokens at which a draft was due and did not start: drafting is suspended, or
            about to be timed, or the settings draft nothing.
        prefill_ms, draft_ms, verify_ms, decode_ms: the request's part of each stage's wall time;
            draft prefills count as draft.
    """

    rounds: int = 0
    drafted_tokens: int = 0
    draft_forwards: int = 0
    accepted_tokens: int = 0
    matched_tokens: int = 0
    matched_prefixes: int = 0
    rejected_matched_prefixes: int = 0
    kv_truncated_drafts: int = 0
    kv_slots_granted: int = 0
    doubted_drafts: int = 0
    skipped_drafts: int = 0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    decode_ms: float = 0.0
    prefill_ms: float = 0.0


class TraceRecord(TypedDict):
    """One round of a trace, sufficient to recompute every verdict elsewhere.

    Of a draft from earlier answers, which are other requests' text, it has the accepted part only.

    Attributes:
        output_start: number of output tokens before the draft.
        source: where the draft comes from: "model", "prediction", "answers", "endpoint", "prompt",
            "eagle3", "mtp", "grammar" or "draft_token_ids".
        anchor_token_id: the last of them.
        draft_token_ids: the draft, including what it carried over from the previous one.
        candidate_token_ids: what a parallel draft's last block proposed behind it, compared with
            the target's choices whatever the verdicts; those that match are in ``bonus_token_ids``.
        tail_at, tail_source: place of the first of the draft's tokens that are a text's, and the
            text's source; null where none extends the draft.
        finished: the draft model ended the answer; the last question is about the complete answer.
        in_doubt: the draft ended because the draft model was unsure.
        prefix_ends: prefix k is the draft's first ``prefix_ends[k]`` tokens.
        judge: "question", "likelihood" or "head", the latter two with "+question" if one is asked
            about complete answers; null in token mode.
        question_token_ids: per prefix, the question's tokens; empty where none was asked.
        accept_token_id, reject_token_id: the verdict tokens; null in token mode.
        verdicts: per prefix: p(accept) / (p(accept) + p(reject)) at the question's last token, or
            the verdict head's.
        verdict_mass: per prefix, p(accept) + p(reject); null where no question was asked.
        threshold: smallest verdict that accepts a prefix.
        strict: the first draft token that ``--parse-strict`` refuses: its ``place`` in the draft,
            from 0, and the ``name`` of its class; null if there is none. Verdicts are the judge's.
        selection: the ``--parse-selection`` rule that was applied; null in token mode and under
            simulated acceptance.
        accepted_len: number of accepted draft tokens.
        decided_by: index of the verdict that decided: it accepts its prefix, or rejects it and the
            prefix before it is accepted; null where no verdict decided.
        next_token_id: the target's token after the accepted prefix; null if the answer ends there.
        bonus_token_ids: output after the accepted prefix: matched draft tokens, then the target's
            next token; empty if the answer ends before.
        target_token_ids: [verified tokens + 1] the target's choice after each draft token.
        plan: ``draft_tokens``, ``max_prefixes``, ``draft_chunk`` of the round, the last measured
            ``speedup``, null before the first, and ``least_chance``, below which a draft ends in
            doubt, null where none does.
        hidden_states: if requested: the target's, of the anchor and the verified draft tokens:
            ``layers``, ``dtype``, ``shape`` and ``data``, little-endian bytes in base64.
        draft_logprobs, draft_entropies: with the likelihood, a verdict head or hidden states: per
            verified draft token its log-probability and the entropy of the target's prediction, in
            nats.
    """

    output_start: int
    source: str
    anchor_token_id: int
    draft_token_ids: list[int]
    candidate_token_ids: list[int]
    tail_at: int | None
    tail_source: str | None
    finished: bool
    in_doubt: bool
    prefix_ends: list[int]
    judge: str | None
    question_token_ids: list[list[int]]
    accept_token_id: int | None
    reject_token_id: int | None
    verdicts: list[float]
    verdict_mass: list[float | None]
    threshold: float
    strict: dict[str, Any] | None
    selection: str | None
    accepted_len: int
    decided_by: int | None
    next_token_id: int | None
    bonus_token_ids: list[int]
    target_token_ids: list[int]
    plan: dict[str, float | None]
    hidden_states: NotRequired[dict[str, Any]]
    draft_logprobs: NotRequired[list[float]]
    draft_entropies: NotRequired[list[float]]
