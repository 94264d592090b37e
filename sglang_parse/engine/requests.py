"""Queries of a request that need both SGLang's ``Req`` and PARSE's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglang_parse.core.phases import PROPOSERS, TARGET_DECODES, Action
from sglang_parse.engine.sglang_types import Req


def tokens_left(req: Req) -> int:
    """Tokens until the request's length limit, in-flight ones subtracted."""
    state = req.parse_state
    return req.sampling_params.max_new_tokens - len(state.output_ids) - state.num_inflight


def draft_budget(req: Req, draft_tokens: int) -> int:
    """Draft tokens that the request's current round may hold, at least 1; ``draft_tokens`` is the
    limit of a round without a plan."""
    plan = req.parse_state.plan
    return max(1, min(plan.draft_tokens if plan else draft_tokens, tokens_left(req)))


def takes_proposal(req: Req) -> bool:
    """Whether a head proposes for the next token; not for the last one."""
    state = req.parse_state
    return state.phase in TARGET_DECODES and state.notes.eagle is not None and tokens_left(req) > 1


def proposal_len(req: Req, longest: int) -> int:
    """Tokens of a head's proposal for the request, of ``longest`` at most; fewer if its source
    has planned it."""
    state = req.parse_state
    if state.draft.source in PROPOSERS and state.plan:
        longest = min(longest, state.plan.draft_tokens)
    return min(longest, tokens_left(req) - 1)


def is_complete(req: Req) -> bool:
    """Whether the answer ends with its output: by a stop token or at its length limit."""
    state = req.parse_state
    return tokens_left(req) <= 0 or not state.policy.stop_ids.isdisjoint(state.output_ids[-1:])


def completes_answer(req: Req, num_drafted: int) -> bool:
    """Whether the answer would end with that many of its draft's tokens."""
    state = req.parse_state
    is_whole = num_drafted == state.num_drafted
    return (state.draft.finished and is_whole) or num_drafted >= tokens_left(req)


def is_greedy(req: Req) -> bool:
    """Whether the target's choices are its most likely tokens."""
    return req.sampling_params.top_k <= 1


def is_adjusted(req: Req) -> bool:
    """Whether the logits of its rows are adjusted before a token is chosen."""
    return req.parse_state.policy.is_adjusted


def needs_hidden_states(reqs: Sequence[Req]) -> bool:
    """Whether the head runs for any of the requests, so that the target captures."""
    return any(req.parse_state.policy.uses_eagle for req in reqs)


def is_gone(req: Req) -> bool:
    """Whether SGLang finished or retracted the request while an iteration was in flight.

    Its slots belong to others by now, and its part of the iteration is dropped.
    """
    return req.finished() or req.is_retracted


def has_ended(req: Req) -> bool:
    """Whether SGLang only has to process what was output.

    A request that SGLang processed and does not finish goes on. Requests that return sampling masks
    go on until SGLang finishes them, because it expects a row for each.
    """
    state = req.parse_state
    if req.return_sampling_mask:
        return False
    if state.fault:
        return True
    if len(state.output_ids) + state.num_inflight <= len(req.output_ids):
        return False
    return is_complete(req)


def stop_ids_of(req: Req) -> frozenset[int]:
    """Token ids at which SGLang finishes the request.

    Source: ``Req._check_token_based_finish``. Stop strings are left to SGLang, which matches them
    against the tokens that are output.
    """
    if req.sampling_params.ignore_eos:  # a grammar ends with the model's
        return frozenset() if req.grammar is None else _eos_ids_of(req)
    return end_ids_of(req)


def end_ids_of(req: Req) -> frozenset[int]:
    """Token ids that end an answer, also if they are to be ignored: ``min_new_tokens`` delays them.

    Source: ``BatchedMinNewTokensPenalizer``.
    """
    return _eos_ids_of(req) | set(req.sampling_params.stop_token_ids or ())


def _eos_ids_of(req: Req) -> frozenset[int]:
    ids = set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        ids.add(req.tokenizer.eos_token_id)
        ids.update(req.tokenizer.additional_stop_token_ids or ())
    return frozenset(ids - {None})


def stop_id_of(req: Req) -> int | None:
    """The token id that an answer usually ends with; None if nothing finishes the request."""
    stop_ids = req.parse_state.policy.stop_ids
    usual = req.tokenizer.eos_token_id if req.tokenizer is not None else None
    return usual if usual in stop_ids else min(stop_ids, default=None)


def sequence_slice(req: Req, start: int, end: int, draft: Sequence[int] = ()) -> list[int]:
    """Token ids [start, end) of prompt + output + draft."""
    ids: list[int] = []
    for part in (req.origin_input_ids, req.parse_state.output_ids, draft):
        low, high = max(0, start), max(0, min(end, len(part)))
        ids.extend(part[low:high])
        start, end = start - len(part), end - len(part)
    return ids


def indices_by_action(actions: Sequence[Action]) -> Mapping[Action, list[int]]:
    """A batch's indices, in order, by its requests' ``actions``; a list for every action."""
    return {action: [i for i, one in enumerate(actions) if one is action] for action in Action}
