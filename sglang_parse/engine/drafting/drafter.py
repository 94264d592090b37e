"""The drafter: chooses the kind of block of a draft chunk and starts it."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from sglang_parse.core.block import BlockKind, Masks
from sglang_parse.core.policy.costs import BlockChoice
from sglang_parse.engine.drafting.chunk import DraftChunk
from sglang_parse.engine.drafting.draft_model import DraftModel
from sglang_parse.engine.drafting.draft_prefill import prefill_missing
from sglang_parse.engine.drafting.parallel import ParallelChunk
from sglang_parse.engine.drafting.token_by_token import TokenChunk
from sglang_parse.engine.requests import is_adjusted
from sglang_parse.engine.sglang_types import Req, ScheduleBatch

logger = logging.getLogger(__name__)

LOG_EVERY = 256
"""Draft chunks between two log lines about their blocks, at least."""


class Drafter:
    """Drafts for one server's requests.

    Args:
        is_masked: run masks after every row in the layout ``mask``, otherwise in ``alias``.
        plans_on_device: whether attention plans a forward from lengths on the device.
        draft_tokens: most tokens of any draft.
    """

    def __init__(
        self,
        model: DraftModel,
        blocks: BlockChoice,
        *,
        is_masked: bool,
        plans_on_device: bool,
        draft_tokens: int,
    ) -> None:
        self.model, self._blocks = model, blocks
        self._is_masked, self._plans_on_device = is_masked, plans_on_device
        self._draft_tokens = draft_tokens
        self._logged: BlockKind | None = None
        self._log_from = 0

    def prefill_missing(self, reqs: Sequence[Req]) -> list[int]:
        return prefill_missing(self.model, reqs)

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
        runs_ahead, draft_tokens = self.model.runs_ahead, self._draft_tokens
        if kind.masks is Masks.NONE:
            return TokenChunk(
                self.model,
                kind,
                batch,
                indices,
                draft_tokens=draft_tokens,
                runs_ahead=runs_ahead,
            )
        # Adjustments of a block depend on the tokens and candidates before it.
        is_any_adjusted = any(is_adjusted(batch.reqs[i]) for i in indices)
        has_graph = self.model.graphs_of(kind, len(indices)) is not None
        is_planned_on_device = self._plans_on_device or has_graph
        return ParallelChunk(
            self.model,
            kind,
            batch,
            indices,
            draft_tokens=draft_tokens,
            runs_ahead=runs_ahead and is_planned_on_device and not is_any_adjusted,
            tokens_per_forward=self._blocks.costs[kind].tokens_per_forward,
            is_masked=self._is_masked,
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
