"""Target forwards of decode iterations, and what they return per request.

A verify pass carries everything in one forward: drafts to verify, EAGLE-3 proposals, and one row of
each request that only decodes, so that the weights are read once. Without drafts and proposals an
ordinary decode step of SGLang runs instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_parse.core.phases import Action
from sglang_parse.device import HostCopy, on_device
from sglang_parse.engine.adjust import LogitsRows, adjust
from sglang_parse.engine.broadcast import broadcast
from sglang_parse.engine.faults import nan_rows
from sglang_parse.engine.forward import (
    RequestRows,
    decode_rows,
    forward_spans,
    run_forward,
    verify_rows,
)
from sglang_parse.engine.heads import Head, next_likelihoods
from sglang_parse.engine.requests import is_adjusted, needs_hidden_states
from sglang_parse.engine.sampling import prepare_rows
from sglang_parse.engine.sglang_types import Req, ScheduleBatch
from sglang_parse.engine.target import TargetModel
from sglang_parse.engine.verdicts import Judge


@dataclass(slots=True)
class TargetResult:
    """One request's part of a target forward, and its result once ``TargetForward.wait`` has it.

    Attributes:
        row: index of the request in the scheduler's batch.
        action: VERIFY (a draft), EAGLE_DECODE (a proposal) or DECODE.
        num_rows: its rows of the forward; ``num_tokens``: those with a choice of the target;
            ``num_answers``: those with the answer to a question.
        proposed: token ids after the anchor that an EAGLE-3 head proposed.
        start: its first row of the forward.
        target_tokens: [num_tokens] the target's choice after each token.
        scores: [num_tokens] each token row's ``Head.scores`` and ``next_likelihoods``; empty
            where verdicts come from questions alone.
        answers: [num_answers] verdict and mass: p(accept) / (p(accept) + p(reject)), and
            p(accept) + p(reject).
        hidden: [num_rows, width] its captured hidden states, if a trace needs them.
        is_nan: logits held a NaN; the other results are meaningless.
    """

    row: int
    action: Action = Action.DECODE
    num_rows: int = 1
    num_tokens: int = 1
    num_answers: int = 0
    proposed: Sequence[int] = ()
    start: int = 0
    target_tokens: Sequence[int] = ()
    scores: Sequence[Sequence[float]] = ()
    answers: Sequence[tuple[float, float]] = ()
    hidden: torch.Tensor | None = None
    is_nan: bool = False

    @classmethod
    def of(cls, part: RequestRows, action: Action) -> TargetResult:
        num_tokens = part.num_token_rows
        num_answers = len(part.logits_rows) - num_tokens
        proposed = part.token_ids[1:] if action is Action.EAGLE_DECODE else ()
        return cls(part.row, action, part.layout.num_rows, num_tokens, num_answers, proposed)

    @property
    def hidden_rows(self) -> slice:
        """Its rows of the forward's hidden states."""
        return slice(self.start, self.start + self.num_rows)

    def fill(self, start: int, values: Iterator[Sequence[float]]) -> None:
        """Takes its own of the forward's rows, from ``start``, and ``values``."""
        self.start = start
        rows = [*islice(values, self.num_tokens)]
        tokens = [row[0] for row in rows]
        self.scores = [row[1:] for row in rows]
        self.answers = [(row[0], row[1]) for row in islice(values, self.num_answers)]
        # The first row has no score of its own.
        checked = chain(tokens, *self.answers, *self.scores[1:])
        self.is_nan = any(map(math.isnan, checked))
        self.target_tokens = () if self.is_nan else [*map(int, tokens)]


class TargetForward:
    """A target forward in flight.

    Args:
        results: the requests in it, without results yet.
        values: float64 [rows with logits, 1, 2 or 5] on the device, in their order: a token id
            and its row's scores and likelihoods, or a verdict with its mass; NaN where logits held
            one.
        reqs: the batch's requests.

    Attributes:
        hidden: [num_rows, width] captured hidden states; None if not captured.
        replays: whether all of it replayed CUDA graphs.
        output: the sampler's output of decode rows, with log probabilities if ``has_logprobs``.
        num_passes: verify passes it took.
        is_decode_only: an ordinary decode step, whose tokens may stay in flight.
        decode_rows: indices into the batch of the requests that decode; ``decoding``: these.
        num_rows: rows of all requests; ``num_verify_rows``: of those whose drafts are verified.
    """

    def __init__(
        self,
        results: Sequence[TargetResult],
        values: torch.Tensor,
        reqs: Sequence[Req],
        *,
        hidden: torch.Tensor | None,
        replays: bool,
        output: LogitsProcessorOutput,
        has_logprobs: bool,
        num_passes: int = 0,
        is_decode_only: bool = False,
    ) -> None:
        self._results = results
        self.hidden, self.replays, self.num_passes = hidden, replays, num_passes
        self.output, self.has_logprobs = output, has_logprobs
        self.is_decode_only = is_decode_only
        self.decode_rows = [part.row for part in results if part.action is Action.DECODE]
        self.decoding = [reqs[row] for row in self.decode_rows]
        self.num_rows = sum(part.num_rows for part in results)
        verified = (part for part in results if part.action is Action.VERIFY)
        self.num_verify_rows = sum(part.num_rows for part in verified)
        self._values = broadcast(values)
        self._on_host = HostCopy(self._values)

    def wait(self) -> Sequence[TargetResult]:
        """Waits for the results, one per request."""
        values, start = iter(self._on_host.tolist()), 0
        for result in self._results:
            result.fill(start, values)
            start += result.num_rows
        return self._results

    def last_tokens(self, reqs: Sequence[Req]) -> torch.Tensor | None:
        """int64 [len(reqs)] tokens of a decode step, on the device; 0 in place of a NaN's. None if
        the host has them."""
        if not any(req.parse_state.num_inflight for req in reqs):
            return None
        places = {id(req): place for place, req in enumerate(self.decoding)}
        index = on_device([places[id(req)] for req in reqs], self._values.device)
        return self._values[index, 0].nan_to_num(0.0).to(torch.int64)


@dataclass(slots=True)
class PassOutputs:
    """Outputs of the forwards that one verify pass is split into.

    Attributes:
        values: ``TargetForward``'s values of verified rows, by forward.
        decode_logits: [rows, vocab] logits of decode rows, by forward.
        hidden: captured hidden states, by forward.
        replays: whether all forwards replayed CUDA graphs.
        num_passes: forwards that verify drafts.
    """

    values: list[torch.Tensor] = field(default_factory=list)
    decode_logits: list[torch.Tensor] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)
    replays: bool = True
    num_passes: int = 0


class Verifier:
    """Runs the target's part of decode iterations.

    Args:
        target: the target model.
        judge: where verdicts come from; None in token mode.
        is_masked: verify in the layout ``mask``, otherwise in ``alias``.
    """

    def __init__(self, target: TargetModel, judge: Judge | None, *, is_masked: bool) -> None:
        self.target, self.judge, self.is_masked = target, judge, is_masked
        self._captures = judge is not None and bool(judge.layers)
        self._scores_rows = self._captures or (judge is not None and judge.head is not None)
        self._num_values = 5 if self._scores_rows else 1 + (judge is not None)

    def decode(
        self, batch: ScheduleBatch, rows: Sequence[int], last_ids: torch.Tensor | None = None
    ) -> TargetForward:
        """An ordinary decode step of the requests ``rows``.

        Args:
            last_ids: int64 [n] their last output tokens, while only the device has them.
        """
        decoded = self.target.decode(batch, rows, last_ids)
        logits_output = decoded.logits_output
        tokens, output, has_logprobs = self._sample(batch, rows, logits_output.next_token_logits)
        return TargetForward(
            [*map(TargetResult, rows)],
            tokens[:, None],
            batch.reqs,
            hidden=logits_output.hidden_states,
            replays=decoded.can_run_graph,
            output=output,
            has_logprobs=has_logprobs,
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

        Requests with a LoRA adapter decode in a separate forward: SGLang's LoRA kernels do not
        support ragged verify rows.

        Args:
            drafted: indices into the batch of the requests whose drafts are verified.
            proposals: by index, what an EAGLE-3 head proposes.
            decoding: indices of the requests that decode one token.
        """
        reqs = batch.reqs
        alone = [row for row in decoding if reqs[row].lora_id]
        riding = [row for row in decoding if not reqs[row].lora_id]
        parts = [
            *(verify_rows(row, reqs[row]) for row in drafted),
            *(decode_rows(row, reqs[row], proposed) for row, proposed in proposals.items()),
            *(decode_rows(row, reqs[row]) for row in riding),
        ]
        actions = [Action.VERIFY] * len(drafted) + [Action.EAGLE_DECODE] * len(proposals)
        actions += [Action.DECODE] * len(riding)
        done = self._run_passes(batch, parts, actions)
        if alone:
            decoded = self.target.decode(batch, alone).logits_output
            done.decode_logits.append(decoded.next_token_logits)
        sampled, has_logprobs = LogitsProcessorOutput(next_token_logits=None), False
        if decoding:
            logits = torch.cat(done.decode_logits)
            tokens, sampled, has_logprobs = self._sample(batch, [*riding, *alone], logits)
            padded = torch.nn.functional.pad(tokens[:, None], (0, self._num_values - 1))
            done.values.append(padded)
        return TargetForward(
            [*map(TargetResult.of, parts, actions), *map(TargetResult, alone)],
            torch.cat(done.values),
            reqs,
            hidden=torch.cat(done.hidden) if done.hidden else None,
            replays=done.replays,
            output=sampled,
            has_logprobs=has_logprobs,
            num_passes=done.num_passes,
        )

    def _run_passes(
        self, batch: ScheduleBatch, parts: Sequence[RequestRows], actions: Sequence[Action]
    ) -> PassOutputs:
        """Runs the forwards of ``parts``, those to decode last."""
        runner, done = self.target.runner, PassOutputs()
        capture = needs_hidden_states([batch.reqs[part.row] for part in parts])
        capture = capture or (self._captures and Action.VERIFY in actions)
        for span in forward_spans(runner, parts):
            output = run_forward(
                runner, batch, parts[span], is_masked=self.is_masked, capture=capture
            )
            done.num_passes += Action.VERIFY in actions[span]
            done.replays = done.replays and output.replays
            if output.hidden is not None:
                done.hidden.append(output.hidden)
            num_verified = sum(action is not Action.DECODE for action in actions[span])
            verified = parts[span][:num_verified]
            num_values = sum(len(part.logits_rows) for part in verified)
            if verified:
                # No name for the logits: the next forward needs their memory.
                done.values.append(
                    self._measure(batch, verified, output.logits[:num_values], output.hidden)
                )
            # Not a view: the next forward overwrites the logits, and needs their memory.
            done.decode_logits.append(output.logits[num_values:].clone())
            del output
        return done

    def _measure(
        self,
        batch: ScheduleBatch,
        parts: Sequence[RequestRows],
        logits: torch.Tensor,
        hidden: torch.Tensor | None,
    ) -> torch.Tensor:
        """float64 [rows, 1, 2 or 5] of verified rows; see ``TargetForward``. Overwrites the logits.

        Verdicts of a head, too, are about the adjusted logits, under which the draft was written.

        Args:
            hidden: [rows of the forward, width] captured hidden states, if any.
        """
        is_bad = nan_rows(logits)
        adjust(logits, _adjusted_rows(batch, parts))
        if self.judge is None:
            values = self._choose(batch, parts, logits).double()[:, None]
            return values.masked_fill_(is_bad[:, None], float("nan"))
        token_index, answer_index = _logits_places(parts)
        tokens = on_device(token_index, logits.device)
        size = len(logits), self._num_values
        values = torch.zeros(size, dtype=torch.float64, device=logits.device)
        if self._scores_rows:
            scored = _score(self.judge.head, parts, logits, tokens, hidden)
            values[tokens, 1:] = scored.double()
        index = tokens if answer_index else None
        values[tokens, 0] = self._choose(batch, parts, logits, index).double()
        if answer_index:
            asked = on_device(answer_index, logits.device)
            values[asked, :2] = self.judge.read(logits[asked]).double()
        return values.masked_fill_(is_bad[:, None], float("nan"))

    def _choose(
        self,
        batch: ScheduleBatch,
        parts: Sequence[RequestRows],
        logits: torch.Tensor,
        index: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The target's choice at every token row.

        Args:
            index: the token rows of ``logits``; None if all are.
        """
        rows = [part.row for part in parts for _ in part.token_rows]
        prepared = prepare_rows(self.target.runner, batch, rows)
        if prepared.is_argmax:  # of all rows: selecting first would copy the logits
            tokens = logits.argmax(dim=-1)
            return tokens if index is None else tokens[index]
        token_logits = logits if index is None else logits[index]
        positions = [part.layout.prefix_len + row for part in parts for row in part.token_rows]
        return prepared.sample(token_logits, on_device(positions, logits.device))[0]

    def _sample(
        self, batch: ScheduleBatch, rows: Sequence[int], logits: torch.Tensor
    ) -> tuple[torch.Tensor, LogitsProcessorOutput, bool]:
        """Samples decode rows.

        Returns:
            float64 [n] token ids, NaN where logits held one; the sampler's output; whether it holds
            log probabilities.
        """
        positions = on_device(
            [batch.reqs[row].parse_state.committed_len for row in rows], batch.device
        )
        is_bad = nan_rows(logits)
        adjusted = [
            LogitsRows(req, place, before=req.parse_state.output_ids)
            for place, req in enumerate(batch.reqs[row] for row in rows)
            if is_adjusted(req)
        ]
        adjust(logits, adjusted)
        has_logprobs = batch.return_logprob and any(batch.reqs[i].return_logprob for i in rows)
        rows_to_sample = prepare_rows(self.target.runner, batch, rows, return_logprob=has_logprobs)
        tokens, output = rows_to_sample.sample(logits, positions)
        return tokens.double().masked_fill(is_bad, float("nan")), output, has_logprobs


def _adjusted_rows(batch: ScheduleBatch, parts: Sequence[RequestRows]) -> list[LogitsRows]:
    """Token rows, of the parts' logits, of requests that are adjusted."""
    adjusted, start = [], 0
    for part in parts:
        req = batch.reqs[part.row]
        if is_adjusted(req):
            drafted = part.token_ids[1 : part.num_token_rows]
            output_ids = req.parse_state.output_ids
            adjusted.append(LogitsRows(req, start, part.num_token_rows, output_ids, drafted))
        start += len(part.logits_rows)
    return adjusted


def _logits_places(parts: Sequence[RequestRows]) -> tuple[list[int], list[int]]:
    """Rows of the parts' logits that are token rows, and the questions' last rows."""
    tokens: list[int] = []
    answers: list[int] = []
    start = 0
    for part in parts:
        middle, end = start + part.num_token_rows, start + len(part.logits_rows)
        tokens.extend(range(start, middle))
        answers.extend(range(middle, end))
        start = end
    return tokens, answers


def _score(
    head: Head | None,
    parts: Sequence[RequestRows],
    logits: torch.Tensor,
    tokens: torch.Tensor,
    hidden: torch.Tensor | None,
) -> torch.Tensor:
    """fp32 [token rows, 4] their ``Head.scores``, 0 without a head, and ``next_likelihoods``."""
    next_ids = [token for part in parts for token in (*part.token_ids[1 : part.num_token_rows], 0)]
    likelihoods = next_likelihoods(logits, tokens, next_ids)
    if head is None:
        return torch.nn.functional.pad(likelihoods, (2, 0))
    if hidden is not None:
        starts = accumulate((part.layout.num_rows for part in parts), initial=0)
        rows = [
            start + row
            for start, part in zip(starts, parts, strict=False)
            for row in part.token_rows
        ]
        hidden = hidden[on_device(rows, hidden.device)]
    return torch.cat([head.scores(hidden, likelihoods), likelihoods], dim=-1)
