"""Target forwards of decode iterations, and what they return per request.

A verify pass carries everything in one forward: drafts to verify, EAGLE-3 proposals, and one row of
each request that only decodes, so that the weights are read once. Without drafts and proposals an
ordinary decode step of SGLang runs instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_parse.core.phases import Action
from sglang_parse.device import HostCopy, on_device
from sglang_parse.engine.broadcast import broadcast
from sglang_parse.engine.faults import nan_rows
from sglang_parse.engine.forward import (
    RequestRows,
    decode_rows,
    forward_spans,
    run_forward,
    verify_rows,
)
from sglang_parse.engine.requests import needs_hidden_states
from sglang_parse.engine.sampling import RowSampler
from sglang_parse.engine.sglang_types import Req, ScheduleBatch
from sglang_parse.engine.target import TargetModel
from sglang_parse.engine.verdicts import QuestionJudge


@dataclass(frozen=True, slots=True)
class TargetResult:
    """Result of a target forward for one request.

    Attributes:
        row: index of the request in the scheduler's batch.
        action: VERIFY (a draft), EAGLE_DECODE (a proposal) or DECODE.
        hidden_rows: its rows of the forward.
        proposed: token ids after the anchor that an EAGLE-3 head proposed.
        target_tokens: [verified tokens + 1] the target's choice after each token.
        verdicts: [num_prefixes] p(accept) / (p(accept) + p(reject)).
        verdict_mass: [num_prefixes] p(accept) + p(reject).
        is_nan: logits held a NaN; the other fields are meaningless.
    """

    row: int
    action: Action
    hidden_rows: slice
    proposed: Sequence[int]
    target_tokens: Sequence[int]
    verdicts: Sequence[float]
    verdict_mass: Sequence[float]
    is_nan: bool

    @property
    def num_rows(self) -> int:
        return self.hidden_rows.stop - self.hidden_rows.start


class TargetForward:
    """A target forward in flight.

    Args:
        actions: per part, the request's action.
        parts: the rows of the requests in it.
        reqs: the batch's requests.
        values: float64 [rows with logits, 1 or 2] on the device, the parts' in order: token ids,
            or verdicts with their mass; NaN where logits held one.

    Attributes:
        hidden: [num_rows, width] captured hidden states; None if not captured.
        replays: whether all of it replayed CUDA graphs.
        output: the sampler's output of decode rows, with log probabilities if ``has_logprobs``.
        num_passes: verify passes it took.
        is_decode_only: an ordinary decode step, whose tokens may stay in flight.
        decode_rows: indices into the batch of the requests that decode; ``decoding``: these.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        parts: Sequence[RequestRows],
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
        self._actions, self._parts = actions, parts
        self.hidden, self.replays, self.num_passes = hidden, replays, num_passes
        self.output, self.has_logprobs = output, has_logprobs
        self.is_decode_only = is_decode_only
        self.decode_rows = [
            part.row for part, action in zip(parts, actions, strict=True) if action is Action.DECODE
        ]
        self.decoding = [reqs[row] for row in self.decode_rows]
        self._values = broadcast(values)
        self._on_host = HostCopy(self._values)

    @property
    def num_rows(self) -> int:
        return sum(part.layout.num_rows for part in self._parts)

    def wait(self) -> list[TargetResult]:
        """Waits for the results, one per request."""
        values = iter(self._on_host.tolist())
        ends = accumulate((part.layout.num_rows for part in self._parts), initial=0)
        return [
            _result(part, action, slice(*span), list(islice(values, len(part.logits_rows))))
            for part, action, span in zip(self._parts, self._actions, pairwise(ends), strict=True)
        ]

    def last_tokens(self, reqs: Sequence[Req]) -> torch.Tensor | None:
        """int64 [len(reqs)] tokens of a decode step, on the device; 0 in place of a NaN's. None if
        the host has them."""
        if not any(req.parse_state.num_inflight for req in reqs):
            return None
        places = {id(req): place for place, req in enumerate(self.decoding)}
        index = on_device([places[id(req)] for req in reqs], self._values.device)
        return self._values[index, 0].nan_to_num(0.0).to(torch.int64)


def _result(
    part: RequestRows, action: Action, hidden_rows: slice, values: Sequence[Sequence[float]]
) -> TargetResult:
    is_nan = any(math.isnan(value[0]) for value in values)
    tokens, verdicts = values[: part.num_token_rows], values[part.num_token_rows :]
    return TargetResult(
        row=part.row,
        action=action,
        hidden_rows=hidden_rows,
        proposed=part.token_ids[1:] if action is Action.EAGLE_DECODE else (),
        target_tokens=() if is_nan else [int(value[0]) for value in tokens],
        verdicts=() if is_nan else [value[0] for value in verdicts],
        verdict_mass=() if is_nan else [value[1] for value in verdicts],
        is_nan=is_nan,
    )


class Verifier:
    """Runs the target's part of decode iterations.

    Args:
        target: the target model.
        judge: where verdicts come from; None in token mode.
        is_masked: verify in the layout ``mask``, otherwise in ``alias``.
    """

    def __init__(
        self, target: TargetModel, judge: QuestionJudge | None, *, is_masked: bool
    ) -> None:
        self.target, self.judge, self.is_masked = target, judge, is_masked

    def decode(
        self, batch: ScheduleBatch, rows: Sequence[int], last_ids: torch.Tensor | None = None
    ) -> TargetForward:
        """An ordinary decode step of the requests ``rows``.

        Args:
            last_ids: int64 [n] their last output tokens, while only the device has them.
        """
        decoded = self.target.decode(batch, rows, last_ids)
        logits_output = decoded.logits_output
        parts = [decode_rows(row, batch.reqs[row]) for row in rows]
        tokens, output, has_logprobs = self._sample(batch, rows, logits_output.next_token_logits)
        return TargetForward(
            [Action.DECODE] * len(rows),
            parts,
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
        reqs, semantic = batch.reqs, self.judge is not None
        decoding = sorted(decoding, key=lambda row: bool(reqs[row].lora_id))
        riding = [row for row in decoding if not reqs[row].lora_id]
        alone = decoding[len(riding) :]
        parts = [
            *(verify_rows(row, reqs[row], semantic=semantic) for row in drafted),
            *(decode_rows(row, reqs[row], proposed) for row, proposed in proposals.items()),
            *(decode_rows(row, reqs[row]) for row in riding),
        ]
        num_verified = len(drafted) + len(proposals)
        num_passes, capture = 0, needs_hidden_states([reqs[part.row] for part in parts])
        values, decode_logits, hidden, replays = [], [], [], True
        for span in forward_spans(self.target.runner, parts):
            output = run_forward(
                self.target.runner,
                batch,
                parts[span],
                is_masked=self.is_masked,
                capture=capture,
            )
            num_passes += 1
            replays = replays and output.replays
            if output.hidden is not None:
                hidden.append(output.hidden)
            verified = parts[span][: max(0, num_verified - span.start)]
            num_values = sum(len(part.logits_rows) for part in verified)
            if verified:
                values.append(self._measure(batch, verified, output.logits[:num_values]))
            # Not a view: the next forward overwrites the logits, and needs their memory.
            decode_logits.append(output.logits[num_values:].clone())
            del output
        if alone:
            decoded = self.target.decode(batch, alone).logits_output
            decode_logits.append(decoded.next_token_logits)
            parts.extend(decode_rows(row, reqs[row]) for row in alone)
        sampled = LogitsProcessorOutput(next_token_logits=None)
        has_logprobs = False
        if decoding:
            tokens, sampled, has_logprobs = self._sample(batch, decoding, torch.cat(decode_logits))
            width = 1 if self.judge is None else 2
            values.append(torch.nn.functional.pad(tokens[:, None], (0, width - 1)))
        return TargetForward(
            [Action.VERIFY] * len(drafted)
            + [Action.EAGLE_DECODE] * len(proposals)
            + [Action.DECODE] * len(decoding),
            parts,
            torch.cat(values),
            reqs,
            hidden=torch.cat(hidden) if hidden else None,
            replays=replays,
            output=sampled,
            has_logprobs=has_logprobs,
            num_passes=num_passes if drafted else 0,
        )

    def _measure(
        self, batch: ScheduleBatch, parts: Sequence[RequestRows], logits: torch.Tensor
    ) -> torch.Tensor:
        """float64 [rows, 1 or 2] of verified rows; see ``TargetForward``. Overwrites the logits."""
        is_bad = nan_rows(logits)
        sampler = RowSampler(self.target.runner, batch)
        if self.judge is None:
            values = _choose(parts, logits, sampler).double()[:, None]
        else:
            token_index, verdict_index = _logits_places(parts)
            tokens = on_device(token_index, logits.device)
            values = torch.zeros(len(logits), 2, dtype=torch.float64, device=logits.device)
            values[tokens, 0] = _choose(parts, logits, sampler, tokens).double()
            if verdict_index:
                asked = on_device(verdict_index, logits.device)
                values[asked] = self.judge.read(logits[asked]).double()
        return values.masked_fill_(is_bad[:, None], float("nan"))

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
        has_logprobs = batch.return_logprob and any(batch.reqs[i].return_logprob for i in rows)
        sampler = RowSampler(self.target.runner, batch)
        tokens, output = sampler.sample(logits, rows, positions, return_logprob=has_logprobs)
        return tokens.double().masked_fill(is_bad, float("nan")), output, has_logprobs


def _choose(
    parts: Sequence[RequestRows],
    logits: torch.Tensor,
    sampler: RowSampler,
    index: torch.Tensor | None = None,
) -> torch.Tensor:
    """The target's choice at every token row.

    Args:
        index: the token rows of ``logits``; None if all are.
    """
    sampled = sampler.prepare([part.row for part in parts for _ in part.token_rows])
    if sampled.is_argmax:  # of all rows: selecting first would copy the logits
        tokens = logits.argmax(dim=-1)
        return tokens if index is None else tokens[index]
    token_logits = logits if index is None else logits[index]
    positions = [part.layout.prefix_len + row for part in parts for row in part.token_rows]
    return sampled.sample(token_logits, on_device(positions, logits.device))[0]


def _logits_places(parts: Sequence[RequestRows]) -> tuple[list[int], list[int]]:
    """Rows of the parts' logits that are token rows, and those that hold verdicts."""
    tokens: list[int] = []
    verdicts: list[int] = []
    start = 0
    for part in parts:
        middle, end = start + part.num_token_rows, start + len(part.logits_rows)
        tokens.extend(range(start, middle))
        verdicts.extend(range(middle, end))
        start = end
    return tokens, verdicts
