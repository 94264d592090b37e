"""Target forwards of decode iterations, and what they return per request.

A verify pass carries everything in one forward: drafts to verify, EAGLE-3 proposals, and one row of
each request that only decodes, so that the weights are read once. Without drafts and proposals an
ordinary decode step of SGLang runs instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_parse.core.phases import Action
from sglang_parse.device import HostCopy, joined_shape, on_device, pack, unpack
from sglang_parse.engine.broadcast import broadcast
from sglang_parse.engine.faults import NAN_IN_TARGET, fault_of
from sglang_parse.engine.forward import (
    RequestRows,
    decode_rows,
    forward_spans,
    run_forward,
    verify_rows,
)
from sglang_parse.engine.judge.judge import Judge
from sglang_parse.engine.logits.logprobs import Record, TokenLogprobs
from sglang_parse.engine.requests import needs_hidden_states
from sglang_parse.engine.row_results import RowReader, RowResults
from sglang_parse.engine.sglang_types import Req, ScheduleBatch
from sglang_parse.engine.states import StateKeeper
from sglang_parse.engine.target import TargetModel


@dataclass(slots=True)
class TargetResult:
    """One request's part of a target forward, and its result once ``TargetForward.wait`` has it.

    Attributes:
        index: the request's, in the scheduler's batch.
        action: VERIFY (a draft), EAGLE_DECODE (a proposal) or DECODE.
        num_rows: its rows of the forward; ``num_tokens``: those with a choice of the target;
            ``num_answers``: those with the answer to a question; ``lag``: those before the anchor.
        proposed: token ids after the anchor that an EAGLE-3 head proposed; ``is_chain``: they are
            the request's draft.
        start: its first row of the forward.
        target_tokens: [num_tokens] the target's choice after each token.
        scores: [num_tokens] each token row's ``Head.scores`` and ``next_likelihoods``; empty
            where verdicts come from questions alone.
        logprobs: [num_tokens] each token row's ``logprobs.Record``, if ``asks_logprobs``.
        answers: [num_answers] verdict and mass: p(accept) / (p(accept) + p(reject)), and
            p(accept) + p(reject).
        hidden: [num_rows, width] its captured hidden states, if a trace needs them.
        fault: why the other results are meaningless: the target's logits held a NaN, or its
            adjusted ones nothing finite.
    """

    index: int
    action: Action = Action.DECODE
    num_rows: int = 1
    num_tokens: int = 1
    num_answers: int = 0
    lag: int = 0
    proposed: Sequence[int] = ()
    is_chain: bool = False
    start: int = 0
    target_tokens: Sequence[int] = ()
    scores: Sequence[Sequence[float]] = ()
    asks_logprobs: bool = False
    logprobs: Sequence[Record] = ()
    answers: Sequence[Sequence[float]] = ()
    hidden: torch.Tensor | None = None
    fault: str = ""

    @classmethod
    def of(cls, part: RequestRows, action: Action) -> TargetResult:
        num_tokens = part.num_token_rows
        num_answers = len(part.logits_rows) - num_tokens
        proposed = part.drafted_ids if action is Action.EAGLE_DECODE else ()
        counts = part.layout.num_rows, num_tokens, num_answers, part.logits_rows[0]
        return cls(part.index, action, *counts, proposed)

    @property
    def is_round(self) -> bool:
        """Whether it verifies a draft."""
        return self.is_chain or self.action is Action.VERIFY

    @property
    def hidden_rows(self) -> slice:
        """From the anchor on."""
        return slice(self.start + self.lag, self.start + self.num_rows)

    def logprobs_of(self, tokens: Sequence[int]) -> Sequence[TokenLogprobs]:
        """Log probabilities of the output ``tokens``, each the target's choice or a draft token;
        none if the request does not ask for them."""
        choices = zip(tokens, self.target_tokens, self.logprobs, strict=False)
        return [(record[int(token != choice)], record) for token, choice, record in choices]

    def fill(
        self, tokens: Iterator, scores: Iterator, answers: Iterator, records: Iterator
    ) -> None:
        """Takes its own rows of what the forward says (``RowResults``), each in its order."""
        found = [*map(int, islice(tokens, self.num_tokens))]
        self.scores = [*islice(scores, self.num_tokens)]
        self.answers = [*islice(answers, self.num_answers)]
        if self.asks_logprobs:
            self.logprobs = [*islice(records, self.num_tokens)]
        self.fault = fault_of(found)
        # The first row has no score of its own.
        if any(map(math.isnan, chain(*self.answers, *self.scores[1:]))):
            self.fault = NAN_IN_TARGET
        self.target_tokens = () if self.fault else found


class TargetForward:
    """A target forward in flight.

    Args:
        results: the requests in it, without results yet.
        rows: what its rows say, of each forward that it is split into.

    Attributes:
        hidden: [num_rows, width] captured hidden states; None if not captured.
        replays: whether all of it replayed CUDA graphs.
        graphs: see ``StageTime``.
        output: the sampler's output of decode rows, with sampling masks if asked for.
        made: see ``HostCopy``.
        num_passes: verify passes it took.
        is_decode_only: an ordinary decode step, whose tokens may stay in flight.
        decode_indices: indices into the batch of the requests that decode; ``decoding``: these.
        num_rows: rows of all requests; ``num_verify_rows``: of those whose drafts are verified.
    """

    def __init__(
        self,
        results: Sequence[TargetResult],
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
        self._results, self.graphs = results, tuple(graphs)
        self.hidden, self.replays, self.num_passes = hidden, replays, num_passes
        self.output = output
        self.is_decode_only = is_decode_only
        self.decode_indices = [part.index for part in results if part.action is Action.DECODE]
        self.decoding = [reqs[i] for i in self.decode_indices]
        self.num_rows = sum(part.num_rows for part in results)
        verified = (part for part in results if part.action is not Action.DECODE)
        self.num_verify_rows = sum(part.num_rows for part in verified)
        columns = RowResults.columns(rows)
        self._shapes = [joined_shape(column) for column in columns]
        self._packed = broadcast(pack(columns))
        self._on_host = HostCopy(self._packed)
        self.made = self._on_host.made
        start = 0
        for result in results:
            req = reqs[result.index]
            result.start, start = start, start + result.num_rows
            if hidden is not None and req.parse_state.policy.keep_hidden_states:
                result.hidden = hidden[result.hidden_rows]
            result.asks_logprobs = req.return_logprob
            is_proposed = result.action is Action.EAGLE_DECODE
            result.is_chain = is_proposed and req.parse_state.waits_for_chain

    def wait(self) -> Sequence[TargetResult]:
        rows = [*map(iter, unpack(self._on_host.tolist(), self._shapes))]
        for result in self._results:
            result.fill(*rows)
        for req in self.decoding if self.is_decode_only else ():
            req.parse_state.arrive_decode()
        return self._results

    def last_tokens(self, reqs: Sequence[Req]) -> torch.Tensor | None:
        """int64 [len(reqs)] tokens of a decode step, on the device; 0 in place of a fault. None if
        the host has them."""
        if not any(req.parse_state.num_inflight for req in reqs):
            return None
        places = {id(req): place for place, req in enumerate(self.decoding)}
        index = on_device([places[id(req)] for req in reqs], self._packed.device)
        return self._packed[index].clamp(min=0).to(torch.int64)  # its tokens come first


@dataclass(slots=True)
class PassOutputs:
    """Outputs of the forwards that one verify pass is split into.

    Attributes:
        rows: what verified rows say, by forward.
        decode_logits: [rows, vocab] logits of decode rows, by forward.
        hidden: captured hidden states, by forward.
        graphs: rows of the CUDA graph that each forward replayed; 0 without one.
        num_passes: forwards that verify drafts.
    """

    rows: list[RowResults] = field(default_factory=list)
    decode_logits: list[torch.Tensor] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)
    graphs: list[int] = field(default_factory=list)
    num_passes: int = 0


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
        proposals: Mapping[int, Sequence[int]],
        before: TargetForward | None,
    ) -> TargetForward | None:
        """The target's part of an iteration, if it has one.

        Args:
            by_action: indices into the batch; ``proposals``: see ``verify``.
            before: the forward launched last, while it is in flight.
        """
        decoding = by_action[Action.DECODE]
        if self.states is not None:
            self.states.save(batch, by_action[Action.VERIFY])
        lags = any(batch.reqs[i].parse_state.state_lag for i in decoding)
        if lags or by_action[Action.VERIFY] or by_action[Action.EAGLE_DECODE]:
            return self.verify(batch, by_action[Action.VERIFY], proposals, decoding)
        if not decoding:
            return None
        last_ids = before.last_tokens([batch.reqs[i] for i in decoding]) if before else None
        return self.decode(batch, decoding, last_ids)

    def settle(
        self,
        batch: ScheduleBatch,
        results: Sequence[TargetResult],
        tokens: Sequence[Sequence[int]],
    ) -> None:
        """Takes back what rejected rows changed; ``tokens``: per request what was output."""
        if self.states is not None:
            self.states.settle(batch, [(one.index, one.num_tokens) for one in results], tokens)

    def decode(
        self, batch: ScheduleBatch, indices: Sequence[int], last_ids: torch.Tensor | None = None
    ) -> TargetForward:
        """An ordinary decode step of the requests ``indices``.

        Args:
            last_ids: int64 [n] their last output tokens, while only the device has them.
        """
        decoded = self.target.decode(batch, indices, last_ids)
        logits_output = decoded.logits_output
        results, output = self._rows.decoded(batch, indices, logits_output.next_token_logits)
        for i in indices:
            batch.reqs[i].parse_state.launch_decode()
        return TargetForward(
            [*map(TargetResult, indices)],
            [results],
            batch.reqs,
            hidden=logits_output.hidden_states,
            replays=decoded.can_run_graph,
            output=output,
            is_decode_only=True,
        )

    def verify(
        self,
        batch: ScheduleBatch,
        drafted: Sequence[int],
        proposals: Mapping[int, Sequence[int]],
        decoding: Sequence[int],
    ) -> TargetForward:
        """One verify pass; several, where one would take too much memory.

        Args:
            drafted: indices into the batch of the requests whose drafts are verified.
            proposals: by index, what an EAGLE-3 head proposes.
            decoding: indices of the requests that decode one token.
        """
        reqs = batch.reqs
        parts = [
            *(verify_rows(i, reqs[i]) for i in drafted),
            *(decode_rows(i, reqs[i], proposed) for i, proposed in proposals.items()),
            *(decode_rows(i, reqs[i]) for i in decoding),
        ]
        actions = [Action.VERIFY] * len(drafted) + [Action.EAGLE_DECODE] * len(proposals)
        actions += [Action.DECODE] * len(decoding)
        done = self._run_passes(batch, parts, actions)
        sampled = LogitsProcessorOutput(next_token_logits=None)
        if decoding:
            logits = torch.cat(done.decode_logits)
            results, sampled = self._rows.decoded(batch, decoding, logits)
            done.rows.append(results)
        return TargetForward(
            [*map(TargetResult.of, parts, actions)],
            done.rows,
            reqs,
            hidden=torch.cat(done.hidden) if done.hidden else None,
            replays=all(done.graphs),
            graphs=done.graphs,
            output=sampled,
            num_passes=done.num_passes,
        )

    def _run_passes(
        self, batch: ScheduleBatch, parts: Sequence[RequestRows], actions: Sequence[Action]
    ) -> PassOutputs:
        """Runs the forwards of ``parts``, those to decode last."""
        runner, done = self.target.runner, PassOutputs()
        capture = needs_hidden_states([batch.reqs[part.index] for part in parts])
        capture = capture or (self._rows.captures and Action.VERIFY in actions)
        for span in forward_spans(runner, parts):
            output = run_forward(
                self.target, batch, parts[span], is_masked=self.is_masked, capture=capture
            )
            num_verified = sum(action is not Action.DECODE for action in actions[span])
            done.num_passes += num_verified > 0
            done.graphs.append(output.graph)
            if output.hidden is not None:
                done.hidden.append(output.hidden)
            verified = parts[span][:num_verified]
            num_logits = sum(len(part.logits_rows) for part in verified)
            if verified:
                # No name for the logits: the next forward needs their memory.
                done.rows.append(
                    self._rows.verified(batch, verified, output.logits[:num_logits], output.hidden)
                )
            # Not a view: the next forward overwrites the logits, and needs their memory.
            done.decode_logits.append(output.logits[num_logits:].clone())
            del output
        return done
