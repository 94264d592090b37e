"""Draft chunks of decode steps: one token per forward."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch

from sglang_parse.core.block import NO_TOKEN
from sglang_parse.core.doubt import level_of
from sglang_parse.device import on_device
from sglang_parse.engine.broadcast import broadcast
from sglang_parse.engine.drafting.chunk import DraftChunk, adjusted_rows, length
from sglang_parse.engine.drafting.draft_model import DecodeInputs
from sglang_parse.engine.drafting.draft_prefill import forward_missing
from sglang_parse.engine.faults import mark_faults, nan_rows
from sglang_parse.engine.logits.adjust import Adjustment
from sglang_parse.engine.logits.sampling import PreparedRows, prepare_rows, surprisals_of
from sglang_parse.engine.sglang_types import Req

STEPS_AHEAD = 4
"""Steps at a chunk's end that the host waits for when it has launched the next one: it has about
5 ms for what takes it 1.5 to 2.5 (estimated for a 1.7B draft model)."""


class TokenChunk(DraftChunk):
    _last: torch.Tensor | None = None

    @property
    def tokens_per_request(self) -> float:
        """Steps: what they cost does not depend on where drafts end."""
        return self.num_forwards

    def _launch(self, indices: Sequence[int], num_steps: int, before: DraftChunk | None) -> None:
        model, reqs = self.model, self._reqs(indices)
        sampled = prepare_rows(model.draft_runner, self.batch, indices)
        lengths = [[length(req) + step for req in reqs] for step in range(num_steps)]
        inputs = DecodeInputs.of(model.req_to_token, reqs, lengths)
        if isinstance(before, TokenChunk):
            logits = model.decode(inputs, 0, before.last_tokens(reqs))
        else:
            logits = forward_missing(model, reqs, lengths[0])
        adjusted = adjusted_rows(reqs)
        adjustment = Adjustment(adjusted, logits.device) if adjusted else None
        unsent, looks = list[torch.Tensor](), self._looks(reqs)
        chosen = _choose(sampled, logits, inputs.positions[0], adjustment)
        for step in range(1, num_steps + 1):
            unsent.append(chosen)
            self.num_forwards += 1
            if looks or step in (num_steps - STEPS_AHEAD, num_steps):
                self._send(indices, unsent)
                unsent.clear()
            if step == num_steps or (looks and not self._goes_on(reqs, before)):
                break
            logits = model.decode(inputs, step, chosen[:, 0].clamp(min=0))
            chosen = _choose(sampled, logits, inputs.positions[step], adjustment)
        self._last = chosen[:, 0]

    def last_tokens(self, reqs: Sequence[Req]) -> torch.Tensor:
        """int64 [len(reqs)] their last tokens, on the device; 0 in place of ``NO_TOKEN``."""
        assert self._last is not None
        last, places = self._last.clamp(min=0), self.places(reqs)
        return last if places == [*range(len(last))] else last[on_device(places, last.device)]

    def _ids(self, steps: torch.Tensor, reqs: Sequence[Req]) -> torch.Tensor:
        del reqs
        return steps[..., 0].clamp(min=0)

    def _receive(self, req: Req, values: Sequence[Sequence[int]], budget: int) -> None:
        sound = [*takewhile(lambda value: value[0] != NO_TOKEN, values)]
        tokens, surprisals = zip(*sound, strict=True) if sound else ((), ())
        levels = self._levels(req, [*map(level_of, surprisals)])
        req.parse_state.add_draft(tokens, budget, num_launched=len(values), levels=levels)


def _choose(
    sampled: PreparedRows,
    logits: torch.Tensor,
    positions: torch.Tensor,
    adjustment: Adjustment | None,
) -> torch.Tensor:
    """int64 [n, 2] the next tokens, ``NO_TOKEN`` where logits held a NaN, and their surprisals."""
    is_bad = nan_rows(logits)
    if adjustment is not None:
        adjustment.apply(logits)
    before = logits if sampled.is_argmax else logits.clone()  # a sampler overwrites them
    tokens = mark_faults(sampled.sample(logits, positions)[0], is_bad)
    chosen = broadcast(torch.stack((tokens, surprisals_of(before, tokens)), 1))
    if adjustment is not None:
        adjustment.advance(chosen[:, 0].clamp(min=0))
    return chosen
