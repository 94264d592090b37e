"""Draft chunks of decode steps: one token per forward."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch

from sglang_parse.core.block import NO_TOKEN
from sglang_parse.core.request import RequestState
from sglang_parse.device import on_device
from sglang_parse.engine.broadcast import broadcast
from sglang_parse.engine.drafting.chunk import DraftChunk, adjusted_rows, length
from sglang_parse.engine.drafting.draft_model import DecodeInputs
from sglang_parse.engine.drafting.draft_prefill import forward_missing
from sglang_parse.engine.faults import mark_faults, nan_rows
from sglang_parse.engine.logits.adjust import Adjustment
from sglang_parse.engine.logits.sampling import PreparedRows, prepare_rows
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
        tokens = [_choose(sampled, logits, inputs.positions[0], adjustment)]
        num_sent = 0
        while (step := len(tokens)) < num_steps and not self._ends_a_draft(reqs, tokens[-1]):
            if step == num_steps - STEPS_AHEAD:
                self._send(indices, tokens)
                num_sent = step
            logits = model.decode(inputs, step, tokens[-1].clamp(min=0))
            tokens.append(_choose(sampled, logits, inputs.positions[step], adjustment))
        self._send(indices, tokens[num_sent:])
        self._last = tokens[-1]
        self.num_forwards += len(tokens)
        for req in reqs:
            req.parse_state.launch_draft(len(tokens))

    def _ends_a_draft(self, reqs: Sequence[Req], tokens: torch.Tensor) -> bool:
        """Whether a draft ends with its token, where the host need not wait to know."""
        return not self._runs_ahead and any(
            token == NO_TOKEN or token in req.parse_state.policy.stop_ids
            for req, token in zip(reqs, tokens.tolist(), strict=True)
        )

    def last_tokens(self, reqs: Sequence[Req]) -> torch.Tensor:
        """int64 [len(reqs)] their last tokens, on the device; 0 in place of ``NO_TOKEN``."""
        assert self._last is not None
        last, places = self._last.clamp(min=0), self.places(reqs)
        return last if places == [*range(len(last))] else last[on_device(places, last.device)]

    def _receive(self, state: RequestState, values: Sequence[int], budget: int) -> None:
        sound = [*takewhile(lambda token: token != NO_TOKEN, values)]
        state.add_draft(sound, budget, num_launched=len(values))


def _choose(
    sampled: PreparedRows,
    logits: torch.Tensor,
    positions: torch.Tensor,
    adjustment: Adjustment | None,
) -> torch.Tensor:
    """int64 [n] the next tokens, ``NO_TOKEN`` where logits held a NaN."""
    is_bad = nan_rows(logits)
    if adjustment is None:
        return broadcast(mark_faults(sampled.sample(logits, positions)[0], is_bad))
    adjustment.apply(logits)
    tokens = broadcast(mark_faults(sampled.sample(logits, positions)[0], is_bad))
    adjustment.advance(tokens.clamp(min=0))
    return tokens
