"""SGLang's requests and batches as PARSE reads them, and results in the shapes it slices."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import get_schedule

from sglang_parse.attention.spec_input import ParseDraftInput
from sglang_parse.core.phases import STEPPING, Action
from sglang_parse.core.request import RequestState
from sglang_parse.device import on_device

# -- requests -------------------------------------------------------------------


def tokens_left(req: Any) -> int:
    """Tokens until the request's length limit."""
    state: RequestState = req.parse_state
    return req.sampling_params.max_new_tokens - len(state.output_ids) - state.num_inflight


def draft_budget(req: Any, draft_tokens: int) -> int:
    """Draft tokens the request's current round may hold, at least 1.

    Args:
        draft_tokens: most tokens of any draft, for a round without a plan.
    """
    plan = req.parse_state.plan
    return max(1, min(plan.draft_tokens if plan else draft_tokens, tokens_left(req)))


def is_accelerated(req: Any) -> bool:
    """Whether the target's next step for this request is made with the EAGLE-3 head.

    Not for an answer's last token: there is nothing to be ahead of.
    """
    state: RequestState = req.parse_state
    steps = state.phase in STEPPING and state.head is not None
    return steps and tokens_left(req) > 1


def needs_hidden_states(reqs: Sequence[Any]) -> bool:
    """Whether an EAGLE-3 head reads any of the requests: the target keeps its states for it."""
    return any(req.parse_state.policy.uses_eagle for req in reqs)


def is_gone(req: Any) -> bool:
    """Whether SGLang has ended or retracted the request while an iteration with it was under way.

    Its slots are not its own any more, and what the iteration wrote is dropped.
    """
    return req.finished() or req.is_retracted


def has_ended(req: Any) -> bool:
    """Whether there is nothing to do but for SGLang to process what has been emitted.

    SGLang decides what ends a request. Should it have processed everything and go on, so does
    PARSE. Those that return sampling masks go on until then: SGLang wants a row for each.
    """
    state: RequestState = req.parse_state
    if req.return_sampling_mask:
        return False
    if state.fault:
        return True
    if len(state.output_ids) + state.num_inflight <= len(req.output_ids):
        return False
    return tokens_left(req) <= 0 or state.output_ids[-1] in state.policy.stop_ids


def stop_ids_of(req: Any) -> frozenset[int]:
    """Tokens at which SGLang would end the request.

    Source: ``Req._check_token_based_finish``. Stop strings are left to SGLang, which looks at
    the tokens that are really emitted.
    """
    params = req.sampling_params
    if params.ignore_eos:
        return frozenset()
    ids = set(params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        ids.add(req.tokenizer.eos_token_id)
        ids.update(req.tokenizer.additional_stop_token_ids or ())
    return frozenset(ids - {None})


def sequence_slice(req: Any, start: int, end: int, draft: Sequence[int] = ()) -> list[int]:
    """Token ids [start, end) of prompt + output + draft."""
    prompt, output = req.origin_input_ids, req.parse_state.output_ids
    ids: list[int] = []
    for part in (prompt, output, draft):
        low, high = max(0, start), max(0, min(end, len(part)))
        ids.extend(part[low:high])
        start, end = start - len(part), end - len(part)
    return ids


# -- batches --------------------------------------------------------------------


def rows_by_action(reqs: Sequence[Any]) -> Mapping[Action, list[int]]:
    """Who makes which move: rows of the batch, in order; a list for every move.

    Beside a grammar SGLang processes the last result between a batch's plan and its launch: a
    request may have ended there, and its slots are no longer its own. It makes none.
    """
    rows: dict[Action, list[int]] = {move: [] for move in Action}
    for row, req in enumerate(reqs):
        if not is_gone(req):
            rows[req.parse_state.action].append(row)
    return rows


def select_requests(
    batch: Any,
    rows: Sequence[int],
    seq_lens: Sequence[int],
    input_ids: Sequence[int] | torch.Tensor | None,
) -> Any:
    """A shallow copy of a ``ScheduleBatch`` for a forward of some requests; the original stays.

    Slots, mode and ``spec_info`` are the caller's to set. Sampling and log probabilities are
    taken out: they happen outside the forward.

    Args:
        batch: the scheduler's batch.
        rows: [n] indices into ``batch.reqs``.
        seq_lens: [n] lengths with the new rows included.
        input_ids: the new rows' tokens, requests concatenated; if a tensor, on the device; None
            where they are the caller's to set, too.
    """
    view = copy.copy(batch)
    view.reqs = [batch.reqs[row] for row in rows]
    if [*rows] != [*range(len(batch.reqs))]:
        view.req_pool_indices = batch.req_pool_indices[on_device(rows, batch.device)]
    view.seq_lens_cpu = torch.tensor(seq_lens)
    view.seq_lens = on_device(seq_lens, batch.device)
    view.seq_lens_sum = sum(seq_lens)
    view.orig_seq_lens = view.seq_lens.to(torch.int32)
    if input_ids is not None and not isinstance(input_ids, torch.Tensor):
        input_ids = on_device(input_ids, batch.device)
    view.input_ids = input_ids
    view.multimodal_inputs = None
    view.return_logprob = False
    view.sampling_info = None
    return view


def max_forward_rows() -> int:
    """Rows of one forward of ours: what SGLang keeps memory free for, a chunk of prefill."""
    schedule = get_schedule()
    chunk = schedule.chunked_prefill_size or -1
    return chunk if chunk > 0 else schedule.max_prefill_tokens


def spans_within(sizes: Sequence[Sequence[int]], limits: Sequence[int]) -> list[slice]:
    """Which items go together: all, or as many as the limits allow, in order.

    Args:
        sizes: [items][kinds of size].
        limits: [kinds of size] of the sum over a span; an item that is larger has one of its own.
    """
    starts, totals = [0], [0] * len(limits)
    for i, size in enumerate(sizes):
        totals = [*map(sum, zip(totals, size, strict=True))]
        if i > starts[-1] and any(t > limit for t, limit in zip(totals, limits, strict=True)):
            starts.append(i)
            totals = [*size]
    return [slice(*span) for span in pairwise([*starts, len(sizes)])] if sizes else []


def slots_of(batch: Any, reqs: Sequence[Any], spans: Iterable[tuple[int, int]]) -> torch.Tensor:
    """int64 [sum of lengths] KV slots of a span [start, end) of each request's row."""
    table = batch.req_to_token_pool.req_to_token
    parts = [
        table[req.kv.req_pool_idx, start:end] for req, (start, end) in zip(reqs, spans, strict=True)
    ]
    return torch.cat(parts).to(torch.int64)


# -- results --------------------------------------------------------------------


class PendingResult(GenerationBatchResult):
    """The result of an iteration under way: filled when the iteration has been committed.

    SGLang reads a result after it has waited for ``copy_done``; so that is what reads the
    iteration, if the next one's plan has not done so before.

    ``can_run_cuda_graph``, for SGLang's log and metrics: whether the iteration's last forward
    replayed a CUDA graph, the target's if it had one, else the draft's.
    """

    def __init__(self, copy_done: Any) -> None:
        """``copy_done``: its ``synchronize`` returns when ``fill`` has been called."""
        super().__init__(
            next_draft_input=ParseDraftInput(),
            # 1, the default, makes the first iteration that emits nothing crash the scheduler.
            num_non_draft_tokens_per_req=0,
        )
        self._copy_done = copy_done

    def fill(
        self, batch: Any, emitted: Sequence[Sequence[int]], output: LogitsProcessorOutput
    ) -> None:
        """Pad the emitted runs to one stride, as SGLang's result processor slices them.

        Args:
            emitted: per row of the batch its new tokens.
            output: the sampler's record; log probabilities, if any, at their requests' places.
        """
        if batch.return_logprob and output.next_token_logprobs is None:
            # Whoever asked for them has ended; SGLang looks for them all the same.
            output.next_token_logprobs = torch.zeros(len(batch.reqs), 1)
        lens = [len(tokens) for tokens in emitted]
        stride = max(1, *lens)
        flat: list[int] = []
        for tokens in emitted:
            flat.extend(tokens)
            flat.extend([0] * (stride - len(tokens)))
        self.logits_output = output
        self.next_token_ids = torch.tensor(flat)
        self.accept_lens = torch.tensor(lens, dtype=torch.int32)
        if not batch.enable_overlap:  # there the relay knows the lengths
            self.new_seq_lens = batch.seq_lens + on_device(lens, batch.seq_lens.device)
        self.speculative_num_draft_tokens = self.speculative_output_stride = stride

    def copy_to_cpu(self, **_: Any) -> None:
        """What SGLang calls when the worker has returned; nothing is copied yet."""
        self.copy_done = self._copy_done


def spread_logprobs(output: LogitsProcessorOutput, rows: Sequence[int], num_reqs: int) -> None:
    """Put the sampled rows' log probabilities at their requests' places, width 1.

    Requests under PARSE never ask for log probabilities; their places stay empty.
    """
    logprobs = torch.zeros(num_reqs, 1)
    logprobs[torch.tensor(rows), 0] = output.next_token_logprobs.float().cpu()
    output.next_token_logprobs = logprobs
    # SGLang calls .tolist() on all of these but the requested ids, which it hands on as they are.
    for name in (
        "next_token_top_logprobs_val",
        "next_token_top_logprobs_idx",
        "next_token_token_ids_logprobs_val",
    ):
        values = getattr(output, name)
        setattr(output, name, _spread(map(torch.as_tensor, values or ()), rows, num_reqs))
    requested_ids = output.next_token_token_ids_logprobs_idx
    output.next_token_token_ids_logprobs_idx = _spread(requested_ids or (), rows, num_reqs)


def _spread(values: Iterable[Any], rows: Sequence[int], num_reqs: int) -> list[Any] | None:
    """``values`` of ``rows`` in a list with a place for every request; None if there are none."""
    places = dict(zip(rows, values, strict=False))
    return [places.get(i, torch.empty(0)) for i in range(num_reqs)] if places else None
