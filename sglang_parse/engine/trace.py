"""Traces: why a round of a request ended as it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from sglang_parse.core.phases import ANSWERS, TraceRecord
from sglang_parse.core.request import RequestState
from sglang_parse.core.selection import Selection
from sglang_parse.engine.judge.head import encode_hidden_states
from sglang_parse.engine.judge.judge import Judge, Verdicts
from sglang_parse.engine.verify import TargetResult


def trace_record(
    state: RequestState,
    result: TargetResult,
    verdicts: Verdicts,
    selection: Selection,
    bonus: Sequence[int],
    judge: Judge | None,
    layers: Sequence[int],
) -> TraceRecord:
    draft, question, refusal = state.draft, judge and judge.question, verdicts.refusal
    if draft.source == ANSWERS:  # somebody else's text
        draft, refusal = draft.accepted(selection.accepted_len), None
    num_prefixes, num_verified = len(draft.prefix_ends), draft.num_verified
    decided_by = selection.decided_by
    record: TraceRecord = {
        "output_start": len(state.output_ids),
        "source": draft.source,
        "anchor_token_id": state.output_ids[-1],
        "draft_token_ids": list(draft.token_ids),
        "finished": draft.finished,
        "prefix_ends": list(draft.prefix_ends),
        "question_token_ids": [list(ids) for ids in draft.question_ids],
        "judge": judge.name if judge else None,
        "accept_token_id": question.accept_id if question else None,
        "reject_token_id": question.reject_id if question else None,
        "verdicts": list(verdicts.values[:num_prefixes]),
        "verdict_mass": list(verdicts.mass[:num_prefixes]),
        "threshold": state.policy.threshold,
        "strict": asdict(refusal) if refusal else None,
        "selection": selection.rule,
        "accepted_len": selection.accepted_len,
        "decided_by": None if decided_by == num_prefixes else decided_by,
        "next_token_id": bonus[0] if bonus else None,
        "bonus_token_ids": list(bonus),
        "target_token_ids": list(result.target_tokens[: num_verified + 1]),
        "plan": asdict(state.plan) if state.plan else {},
    }
    if scores := result.scores[:num_verified]:
        record["draft_logprobs"] = [row[2] for row in scores]
        record["draft_entropies"] = [row[3] for row in scores]
    if result.hidden is not None:
        hidden = result.hidden[: num_verified + 1]
        record["hidden_states"] = encode_hidden_states(hidden, layers)
    return record
