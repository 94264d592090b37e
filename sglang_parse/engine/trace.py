"""Traces: why a round of a request ended as it did."""

from __future__ import annotations

from dataclasses import asdict

import torch

from sglang_parse.core.phases import ANSWERS, TraceRecord
from sglang_parse.core.request import RequestState
from sglang_parse.core.round import Round
from sglang_parse.engine.judge.judge import Judge
from sglang_parse.engine.judge.scorer import encode_hidden_states


def trace_record(
    state: RequestState, one: Round, judge: Judge | None, hidden: torch.Tensor | None = None
) -> TraceRecord:
    """The record of a round of the request, before its tokens are output.

    Args:
        judge: the server's; None in token mode.
        hidden: [>= 1 + verified tokens, width] the target's hidden states, if they are asked for.
    """
    draft, verdicts, refusal = one.draft, one.verdicts, one.verdicts.refusal
    asked = judge if draft.judge else None
    question = asked and asked.question
    if ANSWERS in (draft.source, draft.tail_source):  # somebody else's text
        draft, refusal = draft.accepted(one.accepted_len), None
    num_prefixes, num_verified = len(draft.prefix_ends), draft.num_verified
    record: TraceRecord = {
        "output_start": len(state.output_ids),
        "source": draft.source,
        "anchor_token_id": state.output_ids[-1],
        "draft_token_ids": list(draft.token_ids),
        "candidate_token_ids": list(draft.candidates),
        "tail_at": draft.tail_at,
        "tail_source": draft.tail_source or None,
        "finished": draft.finished,
        "in_doubt": draft.in_doubt,
        "prefix_ends": list(draft.prefix_ends),
        "question_token_ids": [list(ids) for ids in draft.question_ids],
        "judge": asked.name if asked else None,
        "accept_token_id": question.accept_id if question else None,
        "reject_token_id": question.reject_id if question else None,
        "verdicts": list(verdicts.values[:num_prefixes]),
        "verdict_mass": list(verdicts.mass[:num_prefixes]),
        "threshold": state.policy.threshold,
        "strict": asdict(refusal) if refusal else None,
        "selection": one.rule,
        "accepted_len": one.accepted_len,
        "decided_by": None if one.decided_by == num_prefixes else one.decided_by,
        "next_token_id": one.bonus[0] if one.bonus else None,
        "bonus_token_ids": list(one.bonus),
        "target_token_ids": list(one.target_tokens[: num_verified + 1]),
        "plan": state.plan.record() if state.plan else {},
    }
    if scores := one.scores[:num_verified]:
        record["draft_logprobs"] = [row[2] for row in scores]
        record["draft_entropies"] = [row[3] for row in scores]
    if hidden is not None and judge is not None and judge.captured:
        rows = hidden[: num_verified + 1]
        record["hidden_states"] = encode_hidden_states(rows, judge.captured)
    return record
