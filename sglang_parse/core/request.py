"""State machine of one request. Its phase and its KV change here only. No tensors.

``committed`` counts the tokens whose target KV is final. The last output token (the anchor) has no
KV yet: it is the first row of the next forward. SGLang's ``kv_committed_len`` and ``output_ids``
catch up when it processes the iteration's result.

Transitions in one iteration:

    take               plan: the action of this iteration
    launch_draft       draft tokens are in flight           launch_decode   a decode token is
    add_draft          draft tokens arrive                  doubt_draft     it ends in doubt
    verify_ahead       those in flight end the draft, and its pass is launched behind them
    ask                the draft is complete
    count_round        its verify pass has been decided     count_decode    a decode token arrived
    write              its tokens are output, after either
    start_draft        drafting begins behind them          start_decode    the target decodes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sglang_parse.core.notes import Notes
from sglang_parse.core.phases import (
    GIVEN,
    MODEL,
    PROPOSERS,
    TARGET_DECODES,
    Action,
    Draft,
    DraftKey,
    DraftPlan,
    Phase,
    RequestPolicy,
)
from sglang_parse.core.round import Round
from sglang_parse.core.selection import up_to_stop

NAN_IN_DRAFT = "NaN in the draft model's logits"
NAN_IN_TARGET = "NaN in the target model's logits"
NAN_CAUSE = "its weights are damaged, joined in the wrong order, or too large for --dtype"
NAN_FIX = "load its weights again from their source, or set --dtype bfloat16 or float32"


@dataclass(slots=True)
class RequestState:
    """PARSE's state of one request; an attribute of SGLang's ``Req``.

    Attributes:
        phase: what it does in the next iteration; ``action``: in this one.
        plan: plan of the current draft, or of the last one.
        waited: consecutive iterations it waited for KV slots or for its verify pass.
        num_draft_inflight: upper bound of the draft tokens that are not on the host yet.
        draft_kv_len: leading tokens of the sequence with valid draft KV.
        draft_kv_found: ``draft_kv_len`` was looked up since the last prefill.
        in_segment: the target ends a rejected segment before drafting resumes.
        no_draft_reason: why the last draft that was due did not start; "" if none was skipped.
        num_failed: consecutive drafts of the draft model that brought nothing.
        output_ids: output tokens on the host.
        committed: leading tokens of the sequence with final target KV; ``prefilled_len``: those
            that the last prefill wrote; ``state_lag``: those that a recurrent state lacks.
        num_inflight: decode tokens that are not on the host yet.
        num_decoded: output tokens of decode steps, and of an EAGLE-3 head's or MTP layer's drafts.
        fault: why the request must end with an error.
        notes: what other modules keep for it.
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
    in_segment: bool = False
    no_draft_reason: str = ""
    num_failed: int = 0
    output_ids: list[int] = field(default_factory=list)
    committed: int = 0
    prefilled_len: int = 0
    state_lag: int = 0
    num_inflight: int = 0
    num_decoded: int = 0
    fault: str = ""
    notes: Notes = field(default_factory=Notes)

    @property
    def committed_len(self) -> int:
        """Leading tokens of the sequence with final target KV, in-flight ones included."""
        return self.committed + self.num_inflight

    @property
    def num_drafted(self) -> int:
        return len(self.draft.token_ids)

    @property
    def draft_key(self) -> DraftKey:
        """Key of its drafts' statistics."""
        return self.policy.threshold, self.policy.adapter

    @property
    def target_decodes(self) -> bool:
        return self.phase in TARGET_DECODES

    # -- prefill ----------------------------------------------------------------

    def restart(self, prefilled_len: int, output_ids: Sequence[int]) -> None:
        """Resets the state after a prefill, the first one or one that follows a retraction: so many
        tokens are prefilled, of which ``output_ids`` are output."""
        self.phase = Phase.PLAIN if self.policy.is_plain else Phase.DRAFTING
        self.draft, self.in_segment = Draft(), False
        self.committed = self.prefilled_len = prefilled_len
        self.state_lag = 0
        self.draft_kv_len, self.draft_kv_found = 0, False
        num_lost = max(0, len(self.output_ids) - len(output_ids))  # or begun by another server
        self.notes.restart(num_lost, len(self.output_ids))
        self.output_ids = list(output_ids)
        self.num_inflight = self.num_draft_inflight = 0

    def begin(self, first_id: int | None) -> None:
        """The prefill is complete and sampled ``first_id``, if any."""
        if first_id is not None:
            self.output_ids.append(first_id)

    # -- plan -------------------------------------------------------------------

    def take(self, action: Action, num_slots: int = 0, *, cuts_draft: bool = False) -> None:
        """Takes the action of this iteration, as ``kv_demand.allocate_kv_slots`` granted it, with
        so many KV slots behind those of its sequence; ``cuts_draft``: see ``KvGrant``."""
        self.action = action
        self.notes.telemetry.stats.kv_slots_granted += num_slots
        self.waited = self.waited + 1 if action is Action.WAIT and not cuts_draft else 0
        if not cuts_draft:
            return
        if not self.draft.is_truncated:
            self.draft.is_truncated = True
            self.notes.telemetry.stats.kv_truncated_drafts += 1
        if action is Action.WAIT:
            self.phase = Phase.VERIFYING
        else:
            self.draft_kv_len = min(self.draft_kv_len, self.committed_len)
            self.start_decode()
            self.no_draft_reason = "KV slots are short"

    # -- draft ------------------------------------------------------------------

    def launch_draft(self, num_tokens: int) -> None:
        """Counts draft tokens, at most, that the draft model has been launched for."""
        self.num_draft_inflight += num_tokens

    def wait_for_text(self, source: str) -> None:
        """The next draft is on its way."""
        self.phase, self.draft = Phase.WAITING, Draft(source=source)

    def wait_for_proposal(self, num_tokens: int, source: str, *, is_exact: bool) -> None:
        """A head proposes up to ``num_tokens`` in the next iteration, which verifies them."""
        self.start_decode()
        self.plan = DraftPlan(num_tokens, 1, num_tokens)
        self.draft = Draft(source=source, judge=None if is_exact else self.policy.judge)

    def add_draft(
        self,
        token_ids: Sequence[int],
        budget: int,
        *,
        num_launched: int,
        levels: Sequence[int],
        candidates: Sequence[int] | None = None,
    ) -> None:
        """Adds draft tokens that have arrived; drops those after the draft's end.

        Args:
            token_ids: the tokens before the first one that could not be computed.
            budget: draft tokens the round may hold.
            num_launched: how many of ``launch_draft``'s tokens they stand for.
            levels: how sure the draft model is of each token (``core.doubt``).
            candidates: tokens that may follow, if one forward drafted all of ``token_ids``; None if
                a forward drafted each.
        """
        self.num_draft_inflight -= num_launched
        is_awaited = self.draft.num_ahead and not self.is_over(budget)
        if not self.num_draft_inflight:
            self.draft.num_ahead = 0
        if not (is_awaited or self.phase is Phase.DRAFTING) or self.fault:
            return
        is_block, count = candidates is not None, self.num_drafted
        for token, level in zip(token_ids, levels, strict=True):
            self.draft.add(token, level, self.plan.doubt if self.plan else None)
            self.draft.finished = token in self.policy.stop_ids
            if self.is_over(budget):
                self.phase = Phase.VERIFYING
                break
        # The last token's KV may not be written yet.
        self.draft_kv_len = self.committed_len + self.num_drafted
        num_added = self.num_drafted - count
        self.notes.telemetry.count_drafted(self.draft.source, num_added)
        self.notes.telemetry.stats.draft_forwards += min(num_added, 1) if is_block else num_added
        self.draft.candidates = ()
        if candidates is not None and not self.draft.finished:
            # Behind the budget come tokens of this block that the draft has no room for.
            self.draft.candidates = (*token_ids[num_added:], *candidates)[: num_launched - 1]
        if not self.is_over(budget) and len(token_ids) < (1 if is_block else num_launched):
            self.fail(NAN_IN_DRAFT)

    def is_over(self, budget: int) -> bool:
        """Whether the draft ends with its last token, as far as the host has it."""
        return self.draft.finished or self.num_drafted >= budget

    def verify_ahead(self, num_tokens: int) -> None:
        """The draft ends with its tokens in flight; the pass that is launched behind them has rows
        for so many tokens."""
        self.phase = Phase.VERIFYING
        self.draft.num_ahead, self.draft.candidates = num_tokens, ()

    def doubt_draft(self) -> None:
        """The draft ends in doubt."""
        self.phase = Phase.VERIFYING
        self.draft.in_doubt, self.draft.candidates = True, ()
        self.notes.telemetry.stats.doubted_drafts += 1

    def keep_candidates(self, count: int) -> None:
        """The pass that verifies the complete draft compares so many candidates behind it."""
        self.draft.candidates = self.draft.candidates[:count]

    def give_draft(
        self,
        token_ids: Sequence[int],
        max_prefixes: int,
        source: str = GIVEN,
        *,
        is_exact: bool = False,
    ) -> None:
        """Takes a draft that no draft model wrote, to be verified as it is up to a stop token;
        ``is_exact``: only tokens that the target chooses itself are accepted."""
        length = len(token_ids)
        self.start_draft(DraftPlan(length, max_prefixes, length))
        self.draft.source = source
        if is_exact:
            self.draft.judge = None
        self.draft.token_ids += up_to_stop(token_ids, self.policy.stop_ids)
        self.draft.finished = not self.policy.stop_ids.isdisjoint(self.draft.token_ids[-1:])
        self.phase, self.waited = Phase.VERIFYING, 0
        self.notes.telemetry.count_drafted(source, self.num_drafted)

    def make_room(self, num_tokens: int) -> None:
        """A text may extend the draft that has started by so many tokens."""
        self.draft.room = num_tokens

    def extend_draft(self, token_ids: Sequence[int], source: str, *, is_exact: bool) -> None:
        """A text goes on where the complete draft ends; see ``give_draft``."""
        self.draft.tail_at, self.draft.tail_source = self.num_drafted, source
        self.draft.room, self.draft.candidates = 0, ()
        if is_exact:
            self.draft.judge = None
        self.draft.token_ids += token_ids
        self.notes.telemetry.count_drafted(source, len(token_ids))

    def ask(
        self,
        prefix_ends: list[int],
        question_ids: list[tuple[int, ...]],
        *,
        was_thinking: bool = False,
    ) -> None:
        """The draft is over; what its pass will ask.

        Args:
            prefix_ends: [K] ascending draft offsets.
            question_ids: [K] the questions' tokens; () for a prefix that none is asked about.
            was_thinking: a think block is open before the draft.
        """
        self.draft.prefix_ends, self.draft.question_ids = prefix_ends, question_ids
        self.notes.is_thinking, self.notes.num_scanned = was_thinking, len(self.output_ids)

    def record_draft_kv(self, length: int, *, is_sure: bool) -> None:
        """Records a look at the marks: the prompt has draft KV up to ``length`` tokens; if
        ``is_sure``, it need not be looked up again."""
        is_whole = length >= self.prefilled_len
        self.draft_kv_len = max(length, self.draft_kv_len) if is_whole else length
        self.draft_kv_found = is_sure

    def set_draft_kv_len(self, length: int) -> None:
        self.draft_kv_len = length

    # -- target -----------------------------------------------------------------

    def launch_decode(self) -> None:
        self.num_inflight += 1

    def arrive_decode(self) -> None:
        self.num_inflight -= 1

    def lag_state(self, lag: int) -> None:
        self.state_lag = lag

    def count_round(self, one: Round) -> None:
        """Counts a verified draft; ``start_draft`` or ``start_decode`` follows."""
        own = one.parts[0]
        if one.draft.source == MODEL:
            self.num_failed = self.num_failed + 1 if own.has_failed else 0
        elif one.draft.source in PROPOSERS:
            self.num_decoded += len(own.tokens)
        self.notes.telemetry.count_round(one)
        self.notes.arming.observe(one.num_output, len(one.tokens))

    def count_decode(self, num_tokens: int) -> None:
        self.num_decoded += num_tokens
        self.notes.telemetry.count_decode(num_tokens)
        self.notes.arming.observe(0, num_tokens)

    def start_draft(self, plan: DraftPlan) -> None:
        self.phase, self.plan = Phase.DRAFTING, plan
        self.draft = Draft(judge=self.policy.judge)

    def start_decode(self, *, in_segment: bool = False) -> None:
        """The target decodes; ``in_segment``: to end a rejected segment before drafting resumes."""
        self.phase = Phase.PLAIN if self.policy.is_plain else Phase.DECODING
        self.draft, self.in_segment = Draft(), in_segment

    def skip_draft(self, reason: str) -> None:
        """Drafting does not pay now, for ``reason``: the target decodes one more token."""
        self.start_decode()
        self.no_draft_reason = reason
        self.notes.telemetry.stats.skipped_drafts += 1

    def carry_over(self, token_ids: Sequence[int]) -> None:
        """Begins the next draft with ``token_ids``, the unverified end of the last one, whose draft
        KV is valid; so is that of the output, but for its last token."""
        self.draft.token_ids.extend(token_ids)
        if token_ids and self.plan:  # at least one token more than what is drafted already
            longest = max(self.plan.draft_tokens, len(token_ids) + 1)
            self.plan = replace(self.plan, draft_tokens=longest)
        self.draft_kv_len = min(self.draft_kv_len, self.committed_len + len(token_ids))

    def write(self, token_ids: Sequence[int]) -> None:
        """Outputs the tokens of a decode iteration."""
        self.output_ids.extend(token_ids)
        self.committed += len(token_ids)

    def fail(self, reason: str) -> None:
        """Marks the request to end with an error."""
        self.fault = reason
        self.draft = Draft()
