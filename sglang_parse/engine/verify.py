"""Target forwards of decode iterations, and what they return per request.

A verify pass carries everything in one forward: drafts to verify, and one row of each request that
only decodes, so that the weights are read once. Without drafts an ordinary decode step of SGLang
runs instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_parse.core.phases import Action
from sglang_parse.device import HostCopy, joined_shape, on_device, pack, unpack
from sglang_parse.engine.broadcast import broadcast
from sglang_parse.engine.drafting.chunk import DraftChunk
from sglang_parse.engine.faults import NAN_IN_TARGET, fault_of
from sglang_parse.engine.forward import (
    RequestRows,
    decode_rows,
    forward_spans,
    run_forward,
    step_rows,
    verify_rows,
)
from sglang_parse.engine.judge.judge import Judge
from sglang_parse.engine.judge.scorer import hidden_states_of
from sglang_parse.engine.logits.logprobs import Record, TokenLogprobs
from sglang_parse.engine.requests import needs_hidden_states
from sglang_parse.engine.row_results import RowReader, RowResults
from sglang_parse.engine.sglang_types import Req, ScheduleBatch
from sglang_parse.engine.states import StateKeeper
from sglang_parse.engine.target import TargetModel


@dataclass(frozen=True, slots=True)
class TargetResult:
    """What a target forward says about one request's rows.

    Attributes:
        part: the rows.
        target_tokens: [part.num_token_rows] the target's choice after each token; none in a fault.
        scores: [part.num_token_rows] each token row's ``Scorer.scores`` and ``next_likelihoods``;
            empty where verdicts come from questions alone.
        answers: [part.num_answers] verdict and mass: p(accept) / (p(accept) + p(reject)), and
            p(accept) + p(reject).
        logprobs: [part.num_token_rows] each token row's ``logprobs.Record``; empty unless asked.
        hidden: [rows from the anchor on, width] captured hidden states; None if not captured.
        fault: why the other results are meaningless: the target's logits held a NaN, or its
            adjusted ones nothing finite.
    """

    part: RequestRows
    target_tokens: Sequence[int] = ()
    scores: Sequence[Sequence[float]] = ()
    answers: Sequence[Sequence[float]] = ()
    logprobs: Sequence[Record] = ()
    hidden: torch.Tensor | None = None
    fault: str = ""

    @property
    def index(self) -> int:
        """The request's, in the scheduler's batch."""
        return self.part.index

    def logprobs_of(self, tokens: Sequence[int]) -> Sequence[TokenLogprobs]:
        """Log probabilities of the output ``tokens``, each the target's choice or a draft token;
        none if the request does not ask for them."""
        choices = zip(tokens, self.target_tokens, self.logprobs, strict=False)
        return [(record[int(token != choice)], record) for token, choice, record in choices]


class TargetForward:
    """A target forward in flight.

    Args:
        rows: what its rows say, of each forward that it is split into.
        hidden: [num_rows, width] captured hidden states; None if not captured.

    Attributes:
        parts: the requests' rows in it.
        replays: whether all of it replayed CUDA graphs.
        graphs: see ``StageTime``.
        output: the sampler's output of decode rows, with sampling masks if asked for.
        made: see ``HostCopy``.
        num_passes: verify passes it took.
        is_decode_only: an ordinary decode step, whose tokens may stay in flight.
        decoding: the requests that decode.
        num_rows: rows of all requests; ``num_verify_rows``: of those whose drafts are verified.
    """

    def __init__(
        self,
        parts: Sequence[RequestRows],
        rows: Sequence[RowResults],
        reqs: Sequence[Req],
        *,
        hidden: torch.Tensor | None,
        replays: bool,
        output: LogitsProcessorOutput,
        graphs: Sequence[int] = (),
        num_passes: int = 0,
        is_decode_only: bool = False,
    ) -> None:
        self.parts, self._hidden, self.graphs = parts, hidden, tuple(graphs)
        self.replays, self.num_passes, self.output = replays, num_passes, output
        self.is_decode_only = is_decode_only
        self.decoding = [reqs[part.index] for part in parts if part.action is Action.DECODE]
        self._asks_logprobs = [reqs[part.index].return_logprob for part in parts]
        self.num_rows = sum(part.layout.num_rows for part in parts)
        verified = (part for part in parts if part.action is not Action.DECODE)
        self.num_verify_rows = sum(part.layout.num_rows for part in verified)
        columns = RowResults.columns(rows)
        self._shapes = [joined_shape(column) for column in columns]
        self._packed = broadcast(pack(columns))
        self._on_host = HostCopy(self._packed)
        self.made = self._on_host.made

    def wait(self) -> Sequence[TargetResult]:
        """What it says, by request, once the host has it."""
        rows = [*map(iter, unpack(self._on_host.tolist(), self._shapes))]
        for req in self.decoding if self.is_decode_only else ():
            req.parse_state.arrive_decode()
        starts = accumulate((part.layout.num_rows for part in self.parts), initial=0)
        asked = zip(self.parts, starts, self._asks_logprobs, strict=False)
        return [self._result(part, start, asks, rows) for part, start, asks in asked]

    def _result(
        self, part: RequestRows, start: int, asks_logprobs: bool, rows: Sequence[Iterator]
    ) -> TargetResult:
        """Takes the request's own rows of what the forward says: of each of ``RowResults``."""
        (tokens, scores, answers, records), count = rows, part.num_token_rows
        found = [*map(int, islice(tokens, count))]
        own_scores, own_answers = [*islice(scores, count)], [*islice(answers, part.num_answers)]
        fault = fault_of(found)
        # The first row has no score of its own.
        if any(map(math.isnan, chain(*own_answers, *own_scores[1:]))):
            fault = NAN_IN_TARGET
        hidden = self._hidden
        if hidden is not None:
            hidden = hidden[start + part.lag : start + part.layout.num_rows]
        return TargetResult(
            part,
            target_tokens=() if fault else found,
            scores=own_scores,
            answers=own_answers,
            logprobs=[*islice(records, count)] if asks_logprobs else (),
            hidden=hidden,
            fault=fault,
        )

    def last_tokens(self, reqs: Sequence[Req]) -> torch.Tensor | None:
        """int64 [len(reqs)] tokens of a decode step, on the device; 0 in place of a fault. None if
        the host has them."""
        if not any(req.parse_state.num_inflight for req in reqs):
            return None
        places = {id(req): place for place, req in enumerate(self.decoding)}
        index = on_device([places[id(req)] for req in reqs], self._packed.device)
        return self._packed[index].clamp(min=0).to(torch.int64)  # its tokens come first


class Verifier:
    """Runs the target's part of decode iterations.

    Args:
        judge: where verdicts come from; None in token mode.
        is_masked: verify in the layout ``mask``, otherwise in ``alias``.

    Attributes:
        states: of a hybrid target, once its pools are allocated.
    """

    states: StateKeeper | None = None

    def __init__(self, target: TargetModel, judge: Judge | None, *, is_masked: bool) -> None:
        self.target, self.is_masked = target, is_masked
        self._rows = RowReader(target, judge)

    def launch(
        self,
        batch: ScheduleBatch,
        by_action: Mapping[Action, Sequence[int]],
        before: TargetForward | None,
        chunk: DraftChunk | None = None,
    ) -> TargetForward | None:
        """The target's part of an iteration, if it has one.

        Args:
            by_action: indices into the batch.
            before: the forward launched last, while it is in flight; ``chunk``: the draft chunk.
        """
        drafted = [*by_action[Action.VERIFY], *by_action[Action.PROPOSE]]
        decoding = by_action[Action.DECODE]
        if self.states is not None:
            self.states.save(batch, drafted)
        if drafted or any(batch.reqs[i].parse_state.state_lag for i in decoding):
            return self.verify(batch, drafted, decoding, chunk)
        if not decoding:
            return None
        last_ids = before.last_tokens([batch.reqs[i] for i in decoding]) if before else None
        return self.decode(batch, decoding, last_ids)

    def decode(
        self, batch: ScheduleBatch, indices: Sequence[int], last_ids: torch.Tensor | None = None
    ) -> TargetForward:
        """An ordinary decode step of the requests ``indices``.

        Args:
            last_ids: int64 [n] their last output tokens, while only the device has them.
        """
        decoded, parts = self.target.decode(batch, indices, last_ids), [*map(step_rows, indices)]
        logits_output = decoded.logits_output
        results, output = self._rows.results(batch, parts, logits_output.next_token_logits)
        for i in indices:
            batch.reqs[i].parse_state.launch_decode()
        return TargetForward(
            parts,
            [results],
            batch.reqs,
            hidden=hidden_states_of(logits_output),
            replays=decoded.can_run_graph,
            output=output,
            is_decode_only=True,
        )

    def verify(
        self,
        batch: ScheduleBatch,
        drafted: Sequence[int],
        decoding: Sequence[int],
        chunk: DraftChunk | None = None,
    ) -> TargetForward:
        """One verify pass; several, where one would take too much memory.

        Args:
            drafted: indices into the batch of the requests whose drafts are verified.
            decoding: indices of the requests that decode one token.
            chunk: whose tokens in flight are the end of drafts (``Draft.num_ahead``).
        """
        reqs = batch.reqs
        parts = [verify_rows(i, reqs[i]) for i in drafted]
        parts += [decode_rows(i, reqs[i]) for i in decoding]
        capture = needs_hidden_states([reqs[part.index] for part in parts])
        capture = capture or (self._rows.captures and bool(drafted))
        rows, graphs = list[RowResults](), list[int]()
        decode_logits, hidden = list[torch.Tensor](), list[torch.Tensor]()
        for span in forward_spans(self.target.runner, parts):
            ids = _ids_ahead(parts[span], reqs, chunk)
            output = run_forward(
                self.target, batch, parts[span], is_masked=self.is_masked, capture=capture, ids=ids
            )
            verified = [part for part in parts[span] if part.action is not Action.DECODE]
            count = sum(len(part.logits_rows) for part in verified)
            if verified:
                found = output.logits[:count], output.hidden, ids
                rows.append(self._rows.results(batch, verified, *found)[0])
                del found
            # Not a view: the next forward overwrites the logits.
            decode_logits.append(output.logits[count:].clone())
            graphs.append(output.graph)
            if output.hidden is not None:
                hidden.append(output.hidden)
            del output  # the next forward needs the logits' memory
        num_passes, sampled = len(rows), LogitsProcessorOutput(next_token_logits=None)
        if decoding:
            results, sampled = self._rows.results(
                batch, parts[len(drafted) :], torch.cat(decode_logits)
            )
            rows.append(results)
        return TargetForward(
            parts,
            rows,
            reqs,
            hidden=torch.cat(hidden) if hidden else None,
            replays=all(graphs),
            graphs=graphs,
            output=sampled,
            num_passes=num_passes,
        )


def _ids_ahead(
    parts: Sequence[RequestRows], reqs: Sequence[Req], chunk: DraftChunk | None
) -> torch.Tensor | None:
    """int64 [rows] the input ids of drafts' rows, whose last ones are ``chunk``'s, in flight; None
    if the host has all."""
    own = [reqs[part.index] for part in parts]
    if chunk is None or not any(req.parse_state.draft.num_ahead for req in own):
        return None
    in_flight, known = chunk.ids_in_flight(own), [x for part in parts for x in part.token_ids]
    places, sources = list[int](), list[int]()
    ends = accumulate(part.layout.num_rows for part in parts)
    for number, (req, end) in enumerate(zip(own, ends, strict=True)):
        draft, start = req.parse_state.draft, number * in_flight.shape[1]
        num_late = max(0, draft.num_ahead - len(draft.token_ids))
        places += range(end - num_late, end)
        sources += range(start, start + num_late)
    device = in_flight.device
    late = in_flight.flatten()[on_device(sources, device)]
    return on_device(known, device).index_copy_(0, on_device(places, device), late)
