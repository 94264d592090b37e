"""Prefill of the draft model: it computes KV of a sequence when it is about to draft for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_parse.core.request import RequestState
from sglang_parse.device import on_device
from sglang_parse.engine.batch import max_forward_rows
from sglang_parse.engine.drafting.draft_model import DecodeInputs, DraftModel, tokens_of
from sglang_parse.engine.sglang_types import Req

MAX_STEPS = 3
"""Missing tokens that are computed by replayed decode steps: these cost less than a forward without
a CUDA graph (estimated for a 1.7B draft model: 1.3 ms a step, 4 to 7 ms for the forward)."""
MAX_PENDING = 32
"""Missing tokens that a draft chunk computes before or with its first forward. More are computed
and timed by themselves, because the length of a prompt tells nothing about the cost of drafting."""


def prefill_missing(model: DraftModel, reqs: Sequence[Req]) -> list[int]:
    """Computes missing draft KV of requests about to draft, by one forward at most.

    Returns:
        [len(reqs)] tokens computed. A request that ``is_prefilled`` still denies needs another
        forward, in a later iteration.
    """
    unknown = [req for req in reqs if _is_unknown(req.parse_state)]
    if unknown:
        model.kv.look_up(unknown)
    free_rows, counts = max_forward_rows(), []
    for req in reqs:
        missing = _missing(req.parse_state)
        counts.append(min(free_rows, missing) if missing > MAX_PENDING else 0)
        free_rows -= counts[-1]
    filled = [
        (req, req.parse_state.draft_kv_len + n) for req, n in zip(reqs, counts, strict=True) if n
    ]
    if filled:
        prefill_up_to(model, filled)
    return counts


def prefill_up_to(model: DraftModel, ends: Sequence[tuple[Req, int]]) -> None:
    """Computes draft KV of requests, each up to so many tokens of its sequence, by one forward."""
    forward_missing(model, [req for req, _ in ends], [end for _, end in ends])
    for req, end in ends:
        req.parse_state.set_draft_kv_len(end)


def is_prefilled(req: Req) -> bool:
    """Whether a draft chunk can compute what is still missing."""
    return _missing(req.parse_state) <= MAX_PENDING


def kv_len(model: DraftModel, req: Req, end: int) -> int:
    """Leading tokens of [0, end) with KV. A head's KV of a token depends on the next one: that of
    the last token is valid inside a draft only, where the head has seen what follows."""
    state = req.parse_state
    is_inside = state.num_drafted and state.draft_kv_len == end
    return min(end, max(0, state.draft_kv_len - (model.head is not None and not is_inside)))


def forward_missing(model: DraftModel, reqs: Sequence[Req], ends: Sequence[int]) -> torch.Tensor:
    """Forwards the tokens [draft_kv_len, end) of each request, at least one: what was rejected may
    be the target's choice all the same, and then has KV.

    Returns:
        Logits [len(reqs), vocab] of the last ones.
    """
    starts = [min(kv_len(model, req, end), end - 1) for req, end in zip(reqs, ends, strict=True)]
    most = max(end - start for start, end in zip(starts, ends, strict=True))
    is_short = most <= 1 or (most <= 1 + MAX_STEPS and len(reqs) <= model.graph_reqs)
    if is_short and model.head is None:  # decode steps return no hidden states
        logits = _decode_missing(model, reqs, starts, ends, most)
    else:
        logits = model.extend(reqs, starts, ends)
    model.kv.mark([*zip(reqs, starts, ends, strict=True)])
    return logits


def _decode_missing(
    model: DraftModel,
    reqs: Sequence[Req],
    starts: Sequence[int],
    ends: Sequence[int],
    num_steps: int,
) -> torch.Tensor:
    """By decode steps; a request with fewer missing tokens repeats its last one in place."""
    positions = [
        [min(start + step, end - 1) for start, end in zip(starts, ends, strict=True)]
        for step in range(num_steps)
    ]
    known = [
        [tokens_of(req, at, at + 1)[0] for req, at in zip(reqs, row, strict=True)]
        for row in positions
    ]
    lengths = [[at + 1 for at in row] for row in positions]
    inputs = DecodeInputs.of(model.req_to_token, reqs, lengths)
    for step, ids in enumerate(on_device(known, model.device)):
        logits = model.decode(inputs, step, ids)
    return logits


def _missing(state: RequestState) -> int:
    """Tokens with target KV that lack draft KV."""
    return state.committed_len - state.draft_kv_len


def _is_unknown(state: RequestState) -> bool:
    """Whether the length of the draft KV has to be looked up. In the middle of a draft, too: SGLang
    may have replaced the prompt's slots by others with the same tokens since it began."""
    return not (state.draft_kv_found or state.num_draft_inflight)
