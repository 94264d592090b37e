"""One decode iteration: launched in one go, read when its numbers are needed (``overlap``).

Drafters make a burst of the draft model; all others share one target forward in which drafts are
judged and the rest continue. Every stage but the last is read before the next one is launched:
that keeps their times apart.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.payoff import OffSwitch, Stage, Timed
from sglang_parse.core.request import STEPPING, Move, Phase
from sglang_parse.device import Readback, on_device
from sglang_parse.engine.batch import PendingResult, spread_logprobs
from sglang_parse.engine.draft import Burst, DraftModel
from sglang_parse.engine.faults import NAN_IN_TARGET, DraftGuard, end_request, nan_rows
from sglang_parse.engine.guarded_head import GuardedHead
from sglang_parse.engine.kv import is_gone, release_tail
from sglang_parse.engine.overlap import Pipeline
from sglang_parse.engine.ranks import NO_TOKEN, share_choices, share_plain
from sglang_parse.engine.readout import PassReading
from sglang_parse.engine.rounds import RoundJudge
from sglang_parse.engine.sampling import RowSampler
from sglang_parse.engine.target import PlainTarget
from sglang_parse.engine.verify import (
    PassOutput,
    VerifyRows,
    continuing_rows,
    joined,
    max_pass_rows,
    proposed_rows,
    run_passes,
    verifying_rows,
)
from sglang_parse.telemetry.metrics import Tally


@dataclass(frozen=True, slots=True)
class Kit:
    """What iterations work with, the same for all of a server's."""

    config: ParseConfig
    target: PlainTarget
    draft: DraftModel
    draft_guard: DraftGuard
    head: GuardedHead
    judge: RoundJudge
    switch: OffSwitch
    tally: Tally
    pipeline: Pipeline
    is_masked: bool


@dataclass(frozen=True, slots=True)
class _Steps:
    """One token of the target for some requests.

    Attributes:
        rows: [n] their rows of the batch.
        tokens: int64 [n] on the device, ``NO_TOKEN`` where the logits held a NaN.
        readback: the same on their way to the host.
        output: the sampler's record.
        has_logprobs: whether it holds log probabilities.
    """

    rows: Sequence[int]
    tokens: torch.Tensor
    readback: Readback
    output: LogitsProcessorOutput
    has_logprobs: bool


class Iteration:
    """One step of every running request.

    Args:
        kit: see there.
        batch: SGLang's ``ScheduleBatch``, isolated; a view of it is kept until all is read.
    """

    def __init__(self, kit: Kit, batch: Any) -> None:
        self._kit = kit
        self.batch = copy.copy(batch)
        self.result = PendingResult(partial(kit.pipeline.settle, self))
        self._emitted: list[list[int]] = [[] for _ in batch.reqs]
        self._output = LogitsProcessorOutput(next_token_logits=None)
        self._timed: list[Timed] = []
        self._steps: _Steps | None = None  # if they are all there is
        self._read: Callable[[], None] | None = None

    # -- launch -----------------------------------------------------------------

    def launch(self) -> None:
        """Everything on its way on the device, all but the last stage read.

        Beside a grammar SGLang processes the last result between a batch's plan and its launch:
        a request may have ended there, and its slots are no longer its own.
        """
        reqs = self.batch.reqs
        drafting, verifying, stepping, accelerated, ended = (
            [i for i, r in enumerate(reqs) if r.parse_state.move is move and not is_gone(r)]
            for move in (Move.BURST, Move.PASS, Move.STEP, Move.EAGLE, Move.JUDGE)
        )
        for row in ended:
            self._kit.judge.plan(reqs[row])
        if drafting:
            self._launch_burst(drafting)
        if verifying or stepping or accelerated:
            self._read_stage()
        if verifying or accelerated:
            self._launch_pass(verifying, accelerated, stepping)
        elif stepping:
            self._launch_steps(stepping, is_all=not drafting)

    def _launch_burst(self, rows: list[int]) -> None:
        reqs = [self.batch.reqs[row] for row in rows]
        unfinished = (req for req in reqs if req.parse_state.phase is Phase.DRAFTING)
        burst = Burst(self._kit.draft, self.batch, rows)
        self._read = partial(self._read_burst, burst, rows, time.perf_counter())
        with self._kit.draft_guard.contain(unfinished, is_burst=True):
            burst.launch(self._kit.config.burst_tokens)

    def _launch_steps(self, rows: list[int], *, is_all: bool) -> None:
        """No draft to judge: one ordinary decode step of the target.

        ``is_all``: nothing else happens in this iteration.
        """
        started = time.perf_counter()
        unread = self._kit.pipeline.unread_tokens([self.batch.reqs[row] for row in rows])
        decoded = self._kit.target.decode(self.batch, rows, unread)
        steps = self._sample(rows, decoded.next_token_logits)
        for row in rows:
            self.batch.reqs[row].parse_state.num_unread += 1
        self._steps = steps if is_all else None
        self._read = partial(self._read_steps_alone, steps, decoded.hidden_states, started)

    def _launch_pass(
        self, verifying: list[int], accelerated: list[int], stepping: list[int]
    ) -> None:
        """One pass: drafts are judged, the others' next tokens ride along.

        But for requests with an adapter: SGLang's LoRA kernels know no ragged verification rows,
        so these take a decode step of their own.
        """
        kit, batch, started = self._kit, self.batch, time.perf_counter()
        proposals = kit.head.propose(batch, accelerated)
        judged = [
            verifying_rows(i, batch.reqs[i], semantic=kit.config.is_semantic) for i in verifying
        ]
        checked = [proposed_rows(i, batch.reqs[i], tokens) for i, tokens in proposals.items()]
        riding = [i for i in stepping if not batch.reqs[i].lora_id]
        alone = [i for i in stepping if batch.reqs[i].lora_id]
        parts = [*judged, *checked, *(continuing_rows(i, batch.reqs[i]) for i in riding)]
        passes = run_passes(
            kit.target.runner,
            batch,
            parts,
            is_masked=kit.is_masked,
            capture=kit.head.captures,
            max_rows=max_pass_rows(),
        )
        if verifying:
            kit.tally.count("passes_total", len(passes))
        passed = joined(passes)
        sampler = RowSampler(kit.target.runner, batch)
        middle, end = passed.starts[len(judged)], passed.starts[len(judged) + len(checked)]
        readings = (
            PassReading(judged, passed.logits[:middle], sampler, kit.judge.question),
            PassReading(checked, passed.logits[middle:end], sampler, None),
        )
        steps = None
        if stepping:
            logits = passed.logits[end:]
            if alone:
                logits = torch.cat([logits, kit.target.decode(batch, alone).next_token_logits])
            steps = self._sample(riding + alone, logits)
        self._read = partial(self._read_pass, parts, passed, readings, proposals, steps, started)

    def _sample(self, rows: Sequence[int], logits: torch.Tensor) -> _Steps:
        batch = self.batch
        positions = on_device(  # of the input tokens
            [batch.reqs[row].parse_state.committed_len for row in rows], batch.device
        )
        is_bad = nan_rows(logits)
        want_logprob = batch.return_logprob and any(batch.reqs[i].return_logprob for i in rows)
        sampler = RowSampler(self._kit.target.runner, batch)
        tokens, output = sampler.sample(logits, rows, positions, return_logprob=want_logprob)
        shared = share_choices(tokens, is_bad)
        return _Steps(rows, shared, Readback(shared), output, want_logprob)

    # -- read -------------------------------------------------------------------

    def settle(self) -> None:
        """Read the last stage; requests move on, the result is filled."""
        kit = self._kit
        self._read_stage()
        kit.pipeline.last_read = time.perf_counter()
        kit.switch.saw(share_plain(self._timed))
        kit.tally.expected_speedup = kit.switch.speedup
        for req, tokens in zip(self.batch.reqs, self._emitted, strict=True):
            if is_gone(req):
                tokens.clear()
            elif req.parse_state.fault:
                end_request(req, req.parse_state.fault)
                tokens.clear()
            else:
                req.parse_state.write(tokens)
        self.result.fill(self.batch, self._emitted, self._output)

    def _read_stage(self) -> None:
        read, self._read = self._read, None
        if read is not None:
            read()

    def _ms_since(self, started: float) -> float:
        """What a stage took: not the time it waited for the iteration before."""
        return (time.perf_counter() - max(started, self._kit.pipeline.last_read)) * 1e3

    def _read_burst(self, burst: Burst, rows: list[int], started: float) -> None:
        burst.read()
        elapsed_ms = self._ms_since(started)
        self._timed.append(Timed(Stage.BURST, len(rows), burst.num_done, elapsed_ms))
        for row in rows:
            req = self.batch.reqs[row]
            req.parse_state.stats.draft_ms += elapsed_ms / len(rows)
            if not is_gone(req):
                self._kit.judge.plan(req)

    def _read_steps_alone(self, steps: _Steps, hidden: torch.Tensor | None, started: float) -> None:
        for row in steps.rows:
            self.batch.reqs[row].parse_state.num_unread -= 1
        self._read_steps(steps)
        places = [(row, i) for i, row in enumerate(steps.rows)]
        self._kit.head.follow(self.batch, places, hidden, self._emitted)
        elapsed_ms = self._ms_since(started)
        self._timed.append(Timed(Stage.STEP, len(steps.rows), len(steps.rows), elapsed_ms))
        for row in steps.rows:
            stats = self.batch.reqs[row].parse_state.stats
            stats.continuation_ms += elapsed_ms / len(steps.rows)

    def _read_steps(self, steps: _Steps) -> None:
        for row, token in zip(steps.rows, steps.readback.tolist(), strict=True):
            req = self.batch.reqs[row]
            if is_gone(req) or req.parse_state.phase not in STEPPING:
                continue  # SGLang, or the token before this one, has ended what it continued
            if token == NO_TOKEN:
                req.parse_state.fault = NAN_IN_TARGET
            else:
                self._emitted[row] = self._kit.judge.after_steps(req, [token])
        self._output = steps.output
        if steps.has_logprobs:
            spread_logprobs(steps.output, steps.rows, len(self.batch.reqs))

    def _read_pass(
        self,
        parts: Sequence[VerifyRows],
        passed: PassOutput,
        readings: tuple[PassReading, PassReading],
        proposals: dict[int, list[int]],
        steps: _Steps | None,
        started: float,
    ) -> None:
        kit, batch = self._kit, self.batch
        judged, checked = readings
        for part, readout in judged.readouts():
            if not is_gone(req := batch.reqs[part.row]):
                self._emitted[part.row] = kit.judge.settle_round(req, part, readout)
        for part, readout in checked.readouts():
            if not is_gone(req := batch.reqs[part.row]):
                proposed = proposals[part.row]
                self._emitted[part.row] = kit.judge.settle_proposal(req, proposed, readout)
        if steps is not None:
            self._read_steps(steps)
        places = [(part.row, start) for part, start in zip(parts, passed.row_starts, strict=False)]
        kit.head.follow(batch, places, passed.hidden, self._emitted)
        verifying = {part.row for part in judged.parts}
        for row in verifying:
            if not is_gone(req := batch.reqs[row]):
                release_tail(batch, req, req.parse_state.committed_len + len(self._emitted[row]))
        elapsed_ms = self._ms_since(started)
        if verifying:
            self._timed.append(Timed(Stage.PASS, passed.row_starts[-1], 0, elapsed_ms))
        else:
            rows = [*proposals, *(steps.rows if steps else ())]
            num_tokens = sum(len(self._emitted[row]) for row in rows)
            self._timed.append(Timed(Stage.STEP, len(rows), num_tokens, elapsed_ms))
        _share_time(batch, parts, verifying, elapsed_ms / passed.row_starts[-1])

    # -- overlap ----------------------------------------------------------------

    def may_be_followed_unread(self, reqs: Sequence[Any]) -> bool:
        """See ``overlap.Underway``: plain steps alone, for requests that need nothing of them."""
        if self._steps is None or self._kit.head.captures:
            return False
        stepping = {id(self.batch.reqs[row]) for row in self._steps.rows}
        return all(
            id(req) in stepping
            and req.parse_state.steps_unread
            and req.parse_state.phase in STEPPING
            for req in reqs
        )

    def last_tokens(self, reqs: Sequence[Any]) -> torch.Tensor:
        """See ``overlap.Underway``; 0 in place of ``NO_TOKEN``, whose request ends."""
        assert self._steps is not None
        places = {id(self.batch.reqs[row]): i for i, row in enumerate(self._steps.rows)}
        index = on_device([places[id(req)] for req in reqs], self.batch.device)
        return self._steps.tokens[index].clamp(min=0)


def _share_time(
    batch: Any, parts: Sequence[VerifyRows], verifying: set[int], ms_per_row: float
) -> None:
    """Charge a pass to its requests by their rows."""
    for part in parts:
        stats = batch.reqs[part.row].parse_state.stats
        share = ms_per_row * part.layout.num_rows
        if part.row in verifying:
            stats.verification_ms += share
        else:
            stats.continuation_ms += share
