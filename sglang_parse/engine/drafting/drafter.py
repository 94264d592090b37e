"""The drafter: chooses the kind of block of a draft chunk and starts it."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from sglang_parse.core.block import BlockKind, Masks
from sglang_parse.core.policy.costs import BlockChoice
from sglang_parse.engine.drafting.chunk import DraftChunk
from sglang_parse.engine.drafting.draft_model import DraftModel
from sglang_parse.engine.drafting.parallel import ParallelChunk
from sglang_parse.engine.drafting.token_by_token import TokenChunk
from sglang_parse.engine.requests import is_adjusted
from sglang_parse.engine.sglang_types import ScheduleBatch

logger = logging.getLogger(__name__)

LOG_EVERY = 256
"""Draft chunks between two log lines about their blocks, at least."""


class Drafter:
    """Drafts for one server's requests; ``draft_tokens``: most tokens of any draft."""

    def __init__(self, model: DraftModel, blocks: BlockChoice, draft_tokens: int) -> None:
        self.model, self._blocks, self._draft_tokens = model, blocks, draft_tokens
        self._logged: BlockKind | None = None
        self._log_from = 0

    def start(
        self, batch: ScheduleBatch, indices: Sequence[int], before: DraftChunk | None = None
    ) -> DraftChunk:
        """Prepares a draft chunk of the requests ``indices`` of the batch; ``launch`` it then.

        Args:
            before: the chunk launched last, if the host has not waited for all of it. A chunk that
                follows tokens in flight takes its blocks.
        """
        follows = any(batch.reqs[i].parse_state.num_draft_inflight for i in indices)
        if before and follows:
            return self.chunk(before.kind, batch, indices)
        # In pieces, the host's launches cost more than a kind of block can save.
        replayed = [x for x in self._blocks.costs if self.model.has_graph(x, len(indices))]
        chunk = self.chunk(self._blocks.choose(len(indices), replayed), batch, indices)
        chunk.probe_tokens = self._blocks.probe_tokens
        self._log_choice(len(indices))
        return chunk

    def chunk(self, kind: BlockKind, batch: ScheduleBatch, indices: Sequence[int]) -> DraftChunk:
        model, is_block = self.model, kind.masks is not Masks.NONE
        runs_ahead = model.runs_ahead
        if is_block:
            is_planned = model.plans_on_device or model.has_graph(kind, len(indices))
            # Adjustments of a block depend on the tokens and candidates before it.
            is_any_adjusted = any(is_adjusted(batch.reqs[i]) for i in indices)
            runs_ahead = runs_ahead and is_planned and not is_any_adjusted
        return (ParallelChunk if is_block else TokenChunk)(
            model,
            kind,
            batch,
            indices,
            draft_tokens=self._draft_tokens,
            runs_ahead=runs_ahead,
            tokens_per_forward=self._blocks.costs[kind].tokens_per_forward,
        )

    def _log_choice(self, num_requests: int) -> None:
        """Logs a new choice of blocks, and the costs behind it, but not every flicker."""
        blocks = self._blocks
        is_new = blocks.current != self._logged and blocks.num_chunks >= self._log_from
        times = {str(x): cost.per_token(num_requests) for x, cost in blocks.costs.items()}
        if is_new and len(times) > 1 and max(times.values()) < math.inf:
            self._logged, self._log_from = blocks.current, blocks.num_chunks + LOG_EVERY
            costs = "; ".join(f"{x}: {ms:.2f} ms per accepted token" for x, ms in times.items())
            logger.info(
                "PARSE: draft blocks: %s (%d requests; %s)",
                blocks.current,
                num_requests,
                costs,
            )
