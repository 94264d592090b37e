"""A verification pass: one target forward that judges drafts and carries those who only continue.

``Verifier.launch`` sends it off and has it measured on the device; ``LaunchedPass.read`` waits for
the few numbers per request that ``rounds`` decides by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise
from typing import Any

import torch

from sglang_parse.core.question import Question
from sglang_parse.engine.batch import needs_hidden_states
from sglang_parse.engine.forward import forward_spans, run_pass
from sglang_parse.engine.readout import Measured, Spoken
from sglang_parse.engine.rows import (
    VerifyRows,
    continuing_rows,
    proposed_rows,
    verifying_rows,
)
from sglang_parse.engine.sampling import RowSampler
from sglang_parse.engine.steps import Steps, choose_steps
from sglang_parse.engine.target import PlainTarget


@dataclass(frozen=True, slots=True)
class MeasuredPass:
    """What is kept of a pass's output: its logits are not.

    Attributes:
        judged, checked: the readings of those of its parts.
        riding: [n, vocab] logits of those who only continue.
        hidden, replays: see ``PassOutput``.
    """

    judged: Measured
    checked: Measured
    riding: torch.Tensor
    hidden: torch.Tensor | None
    replays: bool


@dataclass(frozen=True, slots=True)
class LaunchedPass:
    """A pass under way; several, where one would take too much memory.

    Attributes:
        passes: the target forwards it is made of.
        parts: the rows of everyone in it: those judged, then those checked, then who continues.
        proposals: by row of the batch, what an EAGLE-3 head proposed.
        steps: those who wrote one token, in the pass or beside it; None if nobody did.
    """

    passes: Sequence[MeasuredPass]
    parts: Sequence[VerifyRows]
    proposals: Mapping[int, Sequence[int]]
    steps: Steps | None

    @property
    def hidden(self) -> torch.Tensor | None:
        """[num_rows, width] what an EAGLE-3 head reads of each row, if captured."""
        hidden = [part.hidden for part in self.passes if part.hidden is not None]
        return torch.cat(hidden) if len(hidden) > 1 else next(iter(hidden), None)

    @property
    def num_passes(self) -> int:
        return len(self.passes)

    @property
    def num_rows(self) -> int:
        return sum(part.layout.num_rows for part in self.parts)

    @property
    def replays(self) -> bool:
        """Whether all of it replayed CUDA graphs."""
        return all(part.replays for part in self.passes)

    @property
    def writing(self) -> list[int]:
        """Rows of the batch that write on without a draft, in the pass or beside it."""
        return [*self.proposals, *(self.steps.rows if self.steps else ())]

    @property
    def places(self) -> list[tuple[int, slice]]:
        """(row of the batch, its rows of the pass) of everyone in it."""
        bounds = pairwise(accumulate((part.layout.num_rows for part in self.parts), initial=0))
        return [(part.row, slice(*span)) for part, span in zip(self.parts, bounds, strict=True)]

    def read(self) -> Spoken:
        """Wait for its numbers."""
        judged = [reading for part in self.passes for reading in part.judged.readouts()]
        checked = [
            (rows.row, self.proposals[rows.row], readout)
            for part in self.passes
            for rows, readout in part.checked.readouts()
        ]
        return Spoken(judged, checked, self.steps.read() if self.steps else ())


class _Kind(Enum):
    """What a part of a pass is there for."""

    JUDGED, CHECKED, RIDING = range(3)


class Verifier:
    """Runs the verification passes of one server's target.

    Args:
        target: the target.
        question: what is asked; None in token mode.
        is_masked: where questions are asked in the layout ``mask``, otherwise in ``alias``.
    """

    def __init__(self, target: PlainTarget, question: Question | None, *, is_masked: bool) -> None:
        self.target, self.question, self.is_masked = target, question, is_masked

    def launch(
        self,
        batch: Any,
        verifying: Sequence[int],
        proposals: Mapping[int, Sequence[int]],
        stepping: Sequence[int],
    ) -> LaunchedPass:
        """One pass: drafts are judged, the others' next tokens ride along.

        But for requests with an adapter: SGLang's LoRA kernels know no ragged verification rows,
        so these take a decode step of their own.

        Args:
            batch: the scheduler's batch.
            verifying: rows of the requests whose drafts are judged.
            proposals: by row, an EAGLE-3 head's proposals to check.
            stepping: rows of the requests that write one token.
        """
        reqs, semantic = batch.reqs, self.question is not None
        judged = [verifying_rows(i, reqs[i], semantic=semantic) for i in verifying]
        checked = [proposed_rows(i, reqs[i], tokens) for i, tokens in proposals.items()]
        riding = [i for i in stepping if not reqs[i].lora_id]
        alone = [i for i in stepping if reqs[i].lora_id]
        continuing = [continuing_rows(i, reqs[i]) for i in riding]
        parts = [*judged, *checked, *continuing]
        kinds = [
            *[_Kind.JUDGED] * len(judged),
            *[_Kind.CHECKED] * len(checked),
            *[_Kind.RIDING] * len(continuing),
        ]
        capture = needs_hidden_states([reqs[part.row] for part in parts])
        passes = [
            self._run(batch, parts[span], kinds[span], capture=capture)
            for span in forward_spans(self.target.runner, parts)
        ]
        return LaunchedPass(
            passes=passes,
            parts=parts,
            proposals=proposals,
            steps=self._steps(batch, riding, alone, passes) if stepping else None,
        )

    def _run(
        self,
        batch: Any,
        parts: Sequence[VerifyRows],
        kinds: Sequence[_Kind],
        *,
        capture: bool,
    ) -> MeasuredPass:
        """One target forward, measured on the device before the next one begins there."""
        runner = self.target.runner
        output = run_pass(runner, batch, parts, is_masked=self.is_masked, capture=capture)
        num_judged, num_checked = kinds.count(_Kind.JUDGED), kinds.count(_Kind.CHECKED)
        num_measured = num_judged + num_checked
        of_judged, of_checked, of_riding = output.split(num_judged, num_checked)
        sampler = RowSampler(runner, batch)
        return MeasuredPass(
            judged=Measured(parts[:num_judged], of_judged, sampler, self.question),
            checked=Measured(parts[num_judged:num_measured], of_checked, sampler, None),
            # The others' logits go when this returns, and forwards may follow.
            riding=of_riding.clone(),
            hidden=output.hidden,
            replays=output.replays,
        )

    def _steps(
        self,
        batch: Any,
        riding: Sequence[int],
        alone: Sequence[int],
        passes: Sequence[MeasuredPass],
    ) -> Steps:
        """The next tokens of those who ride along in ``passes``, and of those who cannot."""
        logits = [part.riding for part in passes]
        if alone:
            logits.append(self.target.decode(batch, alone).logits_output.next_token_logits)
        return choose_steps(self.target.runner, batch, [*riding, *alone], torch.cat(logits))
